"""Runs training from start to end: data, model, resumption, steps, evaluation, checkpoints, export.

``step.py`` has one optimizer step. On XLA a micro-batch is one compiled graph and the update
another. Values are read from the device every ``trainer.log_every_n_steps`` steps.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from nxd_memopt.backends import BACKEND_REASON, backend
from nxd_memopt.checkpoint import require_writable
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config import TrainConfig
from nxd_memopt.training.distributed import is_extracting_graphs, is_rank_zero, world_size
from nxd_memopt.training.documents import open_documents
from nxd_memopt.training.evaluation import held_out_loss, held_out_loss_by_transformers
from nxd_memopt.training.metrics import DeferredMetrics
from nxd_memopt.training.model import (
    build_model,
    load_hf_config,
    load_vocabulary,
    require_executable,
)
from nxd_memopt.training.parallelize import describe_step, parallelize
from nxd_memopt.training.report import Reporter
from nxd_memopt.training.state import Saver, Training, resume
from nxd_memopt.training.step import train_step
from nxd_memopt.training.summary import Summary, export, peak_bytes_of_all_ranks, start_summary
from nxd_memopt.training.tokens import (
    TokenFile,
    Vocabulary,
    micro_batch_positions,
    read_fingerprint,
    tokens_directory,
    write_tokens,
)

COMPILED_LAYERS = "kernels are the compiler's, collectives run between them; a new batch shape compiles again"
EXTRACTED_STEPS = 2
EXTRACTED_MICRO_BATCHES = 2
"""Steps and micro-batches that ``extract_graphs`` runs.

Two are enough: the first of each has its own graph, all later ones share one graph.
"""


def run(config: TrainConfig) -> None:
    """Run the training program: prepare, evaluate, train, evaluate, export. Every rank calls."""
    # Checks that need no model come first: a user error is reported before weights are loaded.
    require_writable(config.trainer.output_dir)
    summary = start_summary(config)
    hf_config = load_hf_config(config.model)
    require_executable(config, hf_config)
    vocabulary = load_vocabulary(config.model, hf_config)
    fingerprint = prepare_data(config, vocabulary)

    # The checkpoint is loaded last: it needs the optimizer, whose states are created for the
    # parameters that parallelize has made final.
    model = build_model(config, hf_config)
    optimizer, forward_backward = parallelize(model, config)
    training = Training(model, optimizer, forward_backward, fingerprint)
    if is_extracting_graphs():
        extract_graphs(training, config)
        return

    notes = [*describe_step(model, config), *resume(training, config)]
    with open_reporter(config, training.step, notes) as reporter:
        summary.held_out_loss_before = evaluate_before(training, config, reporter)
        # The reported peak is of training alone, without loading and the first evaluation.
        backend.reset_peak_memory_stats()
        with gc_frozen():
            train(training, config, reporter)
        summary.peak_memory_bytes = peak_bytes_of_all_ranks()
        summary.held_out_loss_after = evaluate(training, config, reporter)
        finish(training, config, reporter, summary, vocabulary)


def prepare_data(config: TrainConfig, vocabulary: Vocabulary) -> str:
    """Tokenize on rank 0 and return the fingerprint of the tokens. Every rank calls."""
    # raise_together is a barrier and raises on every rank if one rank failed, so no rank reads a
    # partial file, or waits in a collective for a rank that has stopped.
    directory = tokens_directory(config)
    with raise_together("preparing the data"):
        if is_rank_zero():
            write_tokens(
                directory,
                config.data,
                documents=open_documents(config.data),
                vocabulary=vocabulary,
                train_sequences=config.trainer.max_steps * config.data.global_batch_size,
                seed=config.trainer.seed,
            )
    with raise_together("reading the prepared data"):
        return read_fingerprint(directory)


def open_reporter(config: TrainConfig, first_step: int, notes: list[str]) -> Reporter:
    """Return the reporter of a run that has done ``first_step`` steps, and print its setup."""
    # Every rank gets a reporter, so the calls need no condition; all but rank 0's do nothing.
    reporter = Reporter(config.trainer, enabled=is_rank_zero(), first_step=first_step)
    tensor_size = parallel_state.get_tensor_model_parallel_size()
    data_size = parallel_state.get_data_parallel_size()
    reporter.say(
        f"backend {backend.name} ({BACKEND_REASON}); tensor-parallel {tensor_size} x data-parallel {data_size}"
    )
    if config.trainer.compile:
        reporter.say(f"compile {config.trainer.compile}: {COMPILED_LAYERS}")
    if first_step:
        reporter.say(f"resuming after step {first_step}")
    for note in notes:
        reporter.say(note)
    return reporter


def train(training: Training, config: TrainConfig, reporter: Reporter) -> None:
    """Train from ``training.step`` to ``max_steps``, with evaluations and checkpoints."""
    trainer = config.trainer
    # A finished run that is started again trains nothing and does not write its last checkpoint a
    # second time; only evaluation and export run.
    if training.step == trainer.max_steps:
        return
    tokens = open_tokens(config)
    tokens_per_step = config.data.global_batch_size * config.data.seq_length
    metrics = DeferredMetrics(reporter, every=trainer.log_every_n_steps, tokens_per_step=tokens_per_step)
    with Saver(training, config) as saver:
        while training.step < trainer.max_steps:
            metrics.start()
            metrics.add(train_step(training, config, micro_batches(config, tokens, training.step)))
            saver.after_step()
            # ``run`` evaluates after the last step, so the loop does not. All conditions depend
            # on the step alone: every rank takes the same branches, which contain collectives.
            is_last = training.step == trainer.max_steps
            evaluates = not is_last and is_due(training.step, trainer.val_check_interval)
            save_is_due = is_last or is_due(training.step, trainer.save_interval)
            saves = trainer.save_checkpoints and save_is_due
            # Read before the evaluation, so its time does not count as training time, and before
            # the checkpoint: read raises for a loss that is not finite, so none is saved after
            # it.
            if is_last or evaluates or saves:
                metrics.read()
            if evaluates:
                evaluate(training, config, reporter)
            if saves:
                saver.save()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection inside the block.

    A full collection traverses the model and all imported modules, which takes 0.2 s and more.
    The interpreter starts one after enough new objects, typically in a step that begins a
    checkpoint, and under tensor parallelism all ranks then wait for the one that collects.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_due(step: int, interval: int) -> bool:
    """Return whether ``step`` is a multiple of ``interval``; always False for interval 0."""
    return interval > 0 and step % interval == 0


def open_tokens(config: TrainConfig) -> TokenFile:
    """Return the packed training sequences."""
    path = tokens_directory(config) / "train.bin"
    return TokenFile(path, config.data.seq_length, seed=config.trainer.seed)


def micro_batches(config: TrainConfig, tokens: TokenFile, step: int) -> list[Tensor]:
    """Return this data-parallel rank's micro-batches for the step after ``step`` steps.

    Returns:
        One tensor of token ids per forward pass, ``[B, S]``, int64, on the device.
    """
    # Tensor-parallel ranks of one replica have the same data-parallel rank, so they read the same
    # sequences from the file and need no broadcast.
    rank = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_size()
    batches = []
    for micro_step in range(config.accumulation_steps(world_size())):
        positions = micro_batch_positions(
            config.data,
            step=step,
            micro_step=micro_step,
            rank=rank,
            replicas=replicas,
        )
        batches.append(tokens.sequences(positions).to(backend.device))
    return batches


def evaluate(training: Training, config: TrainConfig, reporter: Reporter) -> float | None:
    """Compute, record and return the held-out loss. Every rank calls."""
    loss = held_out_loss(training.model, config)
    if loss is not None:
        reporter.evaluation(training.step, loss)
    return loss


def evaluate_before(training: Training, config: TrainConfig, reporter: Reporter) -> float | None:
    """Return the held-out loss at step 0, recorded if the run is resumed. Every rank calls."""
    # Rank 0 alone reads evaluation.jsonl; the other ranks receive its value.
    recorded = share_texts(json.dumps(reporter.recorded_evaluation(0)))[0]
    if training.step == 0:
        return evaluate(training, config, reporter)
    # The initial weights of a resumed run no longer exist, so their loss can only be looked up.
    return json.loads(recorded)


def finish(
    training: Training,
    config: TrainConfig,
    reporter: Reporter,
    summary: Summary,
    vocabulary: Vocabulary,
) -> None:
    """Export the model, verify the export, and write and show the summary. Every rank calls."""
    directory = Path(config.trainer.output_dir) / "export"
    if config.trainer.export:
        export(training.model, vocabulary.tokenizer, directory)
        summary.export = str(directory)
    # Rank 0 alone loads the export with transformers. The other ranks wait in raise_together and
    # end with its error if that fails.
    with raise_together("finishing"):
        if is_rank_zero():
            if config.trainer.verify_export:
                summary.transformers_held_out_loss = held_out_loss_by_transformers(directory, config)
            summary.steps = training.step
            summary.tokens_per_s = reporter.mean_tokens_per_s()
            summary.write(Path(config.trainer.output_dir))
            reporter.show(summary.table())


def extract_graphs(training: Training, config: TrainConfig) -> None:
    """Run the graphs of evaluation and training once, for ``neuron_parallel_compile`` to collect.

    The device computes nothing in this mode, so no value is checked, and no checkpoint, metric or
    export is written.
    """
    steps = min(EXTRACTED_STEPS, config.trainer.max_steps)
    if is_rank_zero():
        print(f"NEURON_EXTRACT_GRAPHS_ONLY: {steps} steps for their graphs; no value is checked, nothing is saved")
    held_out_loss(training.model, config)
    for step in range(steps):
        batches = micro_batches(config, open_tokens(config), step)
        train_step(training, config, batches[:EXTRACTED_MICRO_BATCHES])
    # Again after training: the parameters are now outputs of the update's graph, so the
    # evaluation may have a different graph than before.
    held_out_loss(training.model, config)
    backend.synchronize()
