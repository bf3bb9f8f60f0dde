"""Owns a training run, in the order in which it happens.

``torchrun --nproc_per_node 8 scripts/train.py --config scripts/configs/llama3_8b.yaml --model.tokenizer DIRECTORY``;
on Trainium scripts/launch/launch.py starts it. A device that compiles graphs (XLA) gets one for a micro-batch, one for
the update; it is asked for values every ``trainer.log_every_n_steps`` steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from nxd_memopt._optional import require_installed, require_transformers
from train_errors import is_rank_zero, user_errors, world_size

with user_errors():  # the backend is chosen at import, and may refuse
    require_installed("scripts/train.py", "tyro", "yaml", "rich", "tensorboard", extra="train")
    require_transformers("scripts/train.py", extra="train")

    import torch
    from torch import Tensor, nn

    from nxd_memopt.backends import BACKEND_REASON, backend
    from nxd_memopt.checkpoint import require_writable
    from nxd_memopt.memory import GraphedLoss
    from nxd_memopt.parallel_layers import parallel_state
    from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
    from train_args import parse_config
    from train_config import TrainConfig
    from train_data import open_documents
    from train_evaluate import held_out_loss, held_out_loss_by_transformers
    from train_model import build_model, load_hf_config, load_vocabulary, require_executable
    from train_optimizer import AdamW, learning_rate, trainable_parameters
    from train_ranks import (
        is_extracting_graphs,
        join_ranks,
        leave_ranks,
        peak_bytes_of_all_ranks,
        sum_over_replicas,
    )
    from train_report import Reporter
    from train_state import Saver, Training, resume
    from train_steps import PendingSteps, Step
    from train_summary import Summary, export, start_summary
    from train_tokens import (
        TokenFile,
        Vocabulary,
        micro_batch_positions,
        read_fingerprint,
        tokens_directory,
        write_tokens,
    )


COMPILED_LAYERS = "kernels are the compiler's, collectives run between them; a new batch shape compiles again"
EXTRACTED = 2  # steps, and micro-batches in each: the first is a graph of its own, the second is like all others


def main() -> None:
    """Run as the command line says."""
    with user_errors():
        config = parse_config(sys.argv[1:])
        join_ranks(config)
        run(config)
        leave_ranks()


def run(config: TrainConfig) -> None:
    """Prepare, evaluate, train, evaluate, export. Every rank calls."""
    require_writable(config.trainer.output_dir)
    summary = start_summary(config)
    hf_config = load_hf_config(config.model)
    require_executable(config, hf_config)
    vocabulary = load_vocabulary(config.model, hf_config)
    fingerprint = prepare_data(config, vocabulary)
    model = build_model(config, hf_config)
    optimizer = AdamW(trainable_parameters(model), config.optimizer)
    training = Training(model, optimizer, forward_backward_of(model, config), fingerprint)
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
    reporter = Reporter(config.trainer, enabled=is_rank_zero(), first_step=first_step)
    tensor, data = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_data_parallel_size()
    reporter.say(f"backend {backend.name} ({BACKEND_REASON}); tensor-parallel {tensor} x data-parallel {data}")
    if config.trainer.compile:
        reporter.say(f"compile {config.trainer.compile}: {COMPILED_LAYERS}")
    if first_step:
        reporter.say(f"resuming after step {first_step}")
    for note in notes:
        reporter.say(note)
    return reporter


def evaluate(training: Training, config: TrainConfig, reporter: Reporter) -> float | None:
    """Find and record the held-out loss now. Every rank calls."""
    loss = held_out_loss(training.model, config)
    if loss is not None:
        reporter.evaluation(training.step, loss)
    return loss


def evaluate_before(training: Training, config: TrainConfig, reporter: Reporter) -> float | None:
    """The held-out loss at step 0; a resumed run has it on record."""
    recorded = share_texts(json.dumps(reporter.recorded_evaluation(0)))[0]
    return evaluate(training, config, reporter) if training.step == 0 else json.loads(recorded)


def train(training: Training, config: TrainConfig, reporter: Reporter) -> None:
    """Train from ``training.step`` to ``max_steps``, with evaluations and checkpoints on the way."""
    trainer = config.trainer
    if training.step == trainer.max_steps:
        return
    tokens = open_tokens(config)
    tokens_per_step = config.data.global_batch_size * config.data.seq_length
    pending = PendingSteps(reporter, every=trainer.log_every_n_steps, tokens_per_step=tokens_per_step)
    with Saver(training, config) as saver:
        while training.step < trainer.max_steps:
            pending.start()
            pending.add(train_step(training, config, micro_batches(config, tokens, training.step)))
            saver.after_step()
            is_last = training.step == trainer.max_steps
            evaluates = not is_last and is_due(training.step, trainer.val_check_interval)
            saves = trainer.save_checkpoints and (is_last or is_due(training.step, trainer.save_interval))
            if is_last or evaluates or saves:
                pending.read()  # raises at a value that is not finite, before anything is saved
            if evaluates:
                evaluate(training, config, reporter)
            if saves:
                saver.save()


def extract_graphs(training: Training, config: TrainConfig) -> None:
    """Run what evaluation and training run, for ``neuron_parallel_compile``, which collects and compiles their graphs.

    The device computes nothing then: no value is read, so nothing is checked for NaN, and no checkpoint, metric or
    export is written.
    """
    steps = min(EXTRACTED, config.trainer.max_steps)
    if is_rank_zero():
        print(f"NEURON_EXTRACT_GRAPHS_ONLY: {steps} steps for their graphs; no value is checked, nothing is saved")
    held_out_loss(training.model, config)
    for step in range(steps):
        train_step(training, config, micro_batches(config, open_tokens(config), step)[:EXTRACTED])
    held_out_loss(training.model, config)  # of parameters that an update wrote, which may be another graph
    backend.synchronize()


def open_tokens(config: TrainConfig) -> TokenFile:
    return TokenFile(tokens_directory(config) / "train.bin", config.data.seq_length, seed=config.trainer.seed)


def is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def micro_batches(config: TrainConfig, tokens: TokenFile, step: int) -> list[Tensor]:
    """This data-parallel rank's share of the sequences of the step after ``step``, ``[B, S]`` per forward pass."""
    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    return [
        tokens.sequences(micro_batch_positions(config.data, step=step, micro_step=i, rank=rank, replicas=replicas)).to(
            backend.device
        )
        for i in range(config.accumulation_steps(world_size()))
    ]


def train_step(training: Training, config: TrainConfig, batches: list[Tensor]) -> Step:
    """One optimizer step over ``batches``, each ``[B, S]``; its loss is the mean over all tokens.

    Fewer batches than a step has, as in ``extract_graphs``, make the same graphs.
    """
    optimizer = training.optimizer
    training.model.train()
    loss = torch.zeros((), device=backend.device)
    for i, batch in enumerate(batches):
        with optimizer.last_backward() if i == len(batches) - 1 else nullcontext():
            loss += training.forward_backward(batch)
        backend.mark_step()
    grad_norm = optimizer.reduce_gradients()
    loss = sum_over_replicas(loss) / parallel_state.get_data_parallel_size()
    lr = learning_rate(training.step + 1, config.optimizer, config.decay_steps)
    optimizer.step(lr)
    optimizer.zero_grad()
    backend.mark_step()
    training.step += 1
    return Step(training.step, loss, grad_norm, lr)


def forward_backward_of(model: nn.Module, config: TrainConfig) -> Callable[[Tensor], Tensor]:
    """What a micro-batch is passed through: forward and backward, as one CUDA graph where the config says so."""
    batches_per_step = config.accumulation_steps(world_size())

    def loss_of(batch: Tensor) -> Tensor:
        return model(batch, labels=batch).loss / batches_per_step

    def forward_backward(batch: Tensor) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        return loss.detach()

    enabled = config.trainer.enable_cuda_graph
    return GraphedLoss(trainable_parameters(model), loss_of) if enabled else forward_backward


def finish(
    training: Training, config: TrainConfig, reporter: Reporter, summary: Summary, vocabulary: Vocabulary
) -> None:
    """Export the model, check the export, and show what the run came to. Every rank calls."""
    directory = Path(config.trainer.output_dir) / "export"
    if config.trainer.export:
        export(training.model, vocabulary.tokenizer, directory)
        summary.export = str(directory)
    with raise_together("finishing"):
        if is_rank_zero():
            if config.trainer.verify_export:
                summary.transformers_held_out_loss = held_out_loss_by_transformers(directory, config)
            summary.steps, summary.tokens_per_s = training.step, reporter.mean_tokens_per_s()
            summary.write(Path(config.trainer.output_dir))
            reporter.show(summary.table())


if __name__ == "__main__":
    main()
