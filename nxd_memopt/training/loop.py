"""A training run from start to end: data, model, resumption, the loop over steps, evaluation, checkpoints, export.

``step.py`` has one optimizer step. A device that compiles graphs (XLA) gets one for a micro-batch and one for the
update; its values are read every ``trainer.log_every_n_steps`` steps.
"""

from __future__ import annotations

import json
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
from nxd_memopt.training.model import build_model, load_hf_config, load_vocabulary, require_executable
from nxd_memopt.training.parallelize import parallelize
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
"""What ``extract_graphs`` runs: the first step and the first micro-batch have graphs of their own, others share one."""


def run(config: TrainConfig) -> None:
    """Prepare, evaluate, train, evaluate, export. Every rank calls."""
    require_writable(config.trainer.output_dir)
    summary = start_summary(config)
    hf_config = load_hf_config(config.model)
    require_executable(config, hf_config)
    vocabulary = load_vocabulary(config.model, hf_config)
    fingerprint = prepare_data(config, vocabulary)
    model = build_model(config, hf_config)
    optimizer, forward_backward = parallelize(model, config)
    training = Training(model, optimizer, forward_backward, fingerprint)
    if is_extracting_graphs():
        extract_graphs(training, config)
        return
    notes = resume(training, config)
    with open_reporter(config, training.step, notes) as reporter:
        summary.held_out_loss_before = evaluate_before(training, config, reporter)
        backend.reset_peak_memory_stats()
        train(training, config, reporter)
        summary.peak_memory_bytes = peak_bytes_of_all_ranks()
        summary.held_out_loss_after = evaluate(training, config, reporter)
        finish(training, config, reporter, summary, vocabulary)


def prepare_data(config: TrainConfig, vocabulary: Vocabulary) -> str:
    """Tokenise on rank 0, once for all ranks, and return the fingerprint of the tokens."""
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
    """Return the reporter of a run that has done ``first_step`` steps, after it has said what is about to run."""
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
    """Train from ``training.step`` to ``max_steps``, with evaluations and checkpoints on the way."""
    trainer = config.trainer
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
            is_last = training.step == trainer.max_steps
            evaluates = not is_last and is_due(training.step, trainer.val_check_interval)
            saves = trainer.save_checkpoints and (is_last or is_due(training.step, trainer.save_interval))
            if is_last or evaluates or saves:
                metrics.read()  # raises at a value that is not finite, before anything is saved
            if evaluates:
                evaluate(training, config, reporter)
            if saves:
                saver.save()


def is_due(step: int, interval: int) -> bool:
    """Return whether something that happens every ``interval`` steps, never if 0, happens after ``step``."""
    return interval > 0 and step % interval == 0


def open_tokens(config: TrainConfig) -> TokenFile:
    """Return the packed training sequences."""
    return TokenFile(tokens_directory(config) / "train.bin", config.data.seq_length, seed=config.trainer.seed)


def micro_batches(config: TrainConfig, tokens: TokenFile, step: int) -> list[Tensor]:
    """Return this data-parallel rank's share of the sequences after ``step``: ``[B, S]`` for each forward pass."""
    rank = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_size()
    batches = []
    for micro_step in range(config.accumulation_steps(world_size())):
        positions = micro_batch_positions(config.data, step=step, micro_step=micro_step, rank=rank, replicas=replicas)
        batches.append(tokens.sequences(positions).to(backend.device))
    return batches


def evaluate(training: Training, config: TrainConfig, reporter: Reporter) -> float | None:
    """Compute, record and return the held-out loss. Every rank calls."""
    loss = held_out_loss(training.model, config)
    if loss is not None:
        reporter.evaluation(training.step, loss)
    return loss


def evaluate_before(training: Training, config: TrainConfig, reporter: Reporter) -> float | None:
    """Return the held-out loss at step 0, which a resumed run has on record. Every rank calls."""
    recorded = share_texts(json.dumps(reporter.recorded_evaluation(0)))[0]
    return evaluate(training, config, reporter) if training.step == 0 else json.loads(recorded)


def finish(
    training: Training, config: TrainConfig, reporter: Reporter, summary: Summary, vocabulary: Vocabulary
) -> None:
    """Export the model, check the export, write and show the summary. Every rank calls."""
    directory = Path(config.trainer.output_dir) / "export"
    if config.trainer.export:
        export(training.model, vocabulary.tokenizer, directory)
        summary.export = str(directory)
    with raise_together("finishing"):
        if is_rank_zero():
            if config.trainer.verify_export:
                summary.transformers_held_out_loss = held_out_loss_by_transformers(directory, config)
            summary.steps = training.step
            summary.tokens_per_s = reporter.mean_tokens_per_s()
            summary.write(Path(config.trainer.output_dir))
            reporter.show(summary.table())


def extract_graphs(training: Training, config: TrainConfig) -> None:
    """Run what evaluation and training run, for ``neuron_parallel_compile``, which collects and compiles the graphs.

    The device computes nothing then, so no value is checked, and no checkpoint, metric or export is written.
    """
    steps = min(EXTRACTED_STEPS, config.trainer.max_steps)
    if is_rank_zero():
        print(f"NEURON_EXTRACT_GRAPHS_ONLY: {steps} steps for their graphs; no value is checked, nothing is saved")
    held_out_loss(training.model, config)
    for step in range(steps):
        train_step(training, config, micro_batches(config, open_tokens(config), step)[:EXTRACTED_MICRO_BATCHES])
    held_out_loss(training.model, config)  # of parameters that an update wrote, which may be another graph
    backend.synchronize()
