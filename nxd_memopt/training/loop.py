"""Runs training from start to end: data, model, resumption, steps, evaluation, checkpoints, export.

``step.py`` has one optimizer step. On XLA a micro-batch is one compiled graph and the update
another. Values are read from the device every ``trainer.log_every_n_steps`` steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from transformers import PretrainedConfig

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import require_writable
from nxd_memopt.checkpoint.sharded.steps import complete_steps, prune, step_directory
from nxd_memopt.modules.lora import whole_model
from nxd_memopt.parallel_layers.coordination import from_rank_zero, raise_together
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.training.answers import SampledAnswers
from nxd_memopt.training.checks import (
    require_applicable_memory,
    require_finite_weights,
    require_trainable,
    require_usable_output,
    with_schedule_of_run,
)
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.micro_batches import MicroBatch, micro_batches
from nxd_memopt.training.data.packed.epochs import require_complete_epochs, with_steps_of_epochs
from nxd_memopt.training.data.packed.feed import WaitStoppedError
from nxd_memopt.training.data.packed.run_tokens import RunTokens, open_tokens, prepare_data
from nxd_memopt.training.data.packed.sequences import MixedSequences
from nxd_memopt.training.data.sources.data_format import with_format
from nxd_memopt.training.data.tokenize.chat import with_chat_template
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.device_support import require_executable
from nxd_memopt.training.evaluation import held_out_loss, held_out_loss_by_transformers, held_out_text
from nxd_memopt.training.lora import apply_lora, find_adapter_base, write_adapters
from nxd_memopt.training.memory_plan import MemoryPlan, plan_memory
from nxd_memopt.training.model import (
    apply_fp8,
    build_model,
    load_hf_config,
    load_initial_weights,
    load_vocabulary,
    require_fp16_range,
)
from nxd_memopt.training.parallelize import describe_step, parallelize
from nxd_memopt.training.profiled import ProfiledSteps
from nxd_memopt.training.reporting.boards import require_boards
from nxd_memopt.training.reporting.metrics import DeferredMetrics, StepResult
from nxd_memopt.training.reporting.mfu import utilization_per_token
from nxd_memopt.training.reporting.reporter import Reporter
from nxd_memopt.training.reporting.start_report import held_out_line, model_line, run_lines, training_lines
from nxd_memopt.training.reporting.summary import (
    Summary,
    export,
    model_files,
    peak_bytes_of_all_ranks,
    require_verified,
    start_summary,
)
from nxd_memopt.training.resume.plan import ResumePlan, plan_resume
from nxd_memopt.training.routers import ExpertForwardBackward
from nxd_memopt.training.runtime.distributed import is_extracting_graphs, is_rank_zero
from nxd_memopt.training.runtime.run_lock import locked_output_directory
from nxd_memopt.training.runtime.signals import Interrupts
from nxd_memopt.training.runtime.start_phases import FIRST_STEP, StartPhases
from nxd_memopt.training.sample import conversation_notes
from nxd_memopt.training.state import Saver, Training, load_warm_start, resume
from nxd_memopt.training.step import train_step
from nxd_memopt.training.stopping import Stopping, message_after_training

EXTRACTED_STEPS = 2
EXTRACTED_MICRO_BATCHES = 2
"""Steps and micro-batches that ``extract_graphs`` runs.

Two are enough: the first of each has its own graph, all later ones share one graph.
"""


def run(config: TrainConfig, interrupts: Interrupts | None = None, phases: StartPhases | None = None) -> None:
    """Run the training program: prepare, evaluate, train, evaluate, export. Every rank calls.

    ``phases`` has the phases of the start that are over.

    Raises:
        Interrupted: ``interrupts`` has received a signal; the state is saved.
    """
    interrupts, phases = interrupts or Interrupts(), phases or StartPhases()
    # Checks that need no model and no file of the run come first: a user error is reported before
    # the output directory is touched and weights are loaded.
    summary = start_summary()
    require_boards(config.trainer.wandb_project)
    hf_config = load_hf_config(config.model, config.moe)
    require_trainable(config, hf_config)
    require_executable(config, hf_config)
    require_applicable_memory(config, hf_config)
    config, memory_plan = plan_memory(config, hf_config)
    summary.planned_memory_bytes = memory_plan.planned_bytes
    summary.available_memory_bytes = memory_plan.available_bytes
    summary.start_s = phases.seconds
    vocabulary = load_vocabulary(config.model, hf_config, end_of_text=config.data.end_of_text)
    config = replace(config, data=with_format(config.data))
    vocabulary = with_chat_template(vocabulary, config.data)
    phases.end("plan and tokenizer")
    with locked_output_directory(config.trainer.output_dir):
        require_writable(config.trainer.output_dir)
        require_usable_output(config)
        epochs = config.trainer.max_epochs
        config = with_schedule_of_run(with_steps_of_epochs(config, vocabulary))
        # Before any file changes: a refused start leaves the files of the finished run.
        plan = plan_resume(config, hf_config)
        require_complete_epochs(plan, epochs)
        tokens = open_tokens(plan, vocabulary)
        try:
            plan = prepare_data(plan, tokens)
            # Other text is read from its first sequence on.
            require_complete_epochs(plan, epochs)
            phases.end("data")
            run_prepared(plan, tokens, hf_config, vocabulary, summary, interrupts, memory_plan, phases)
        finally:
            tokens.close()


def run_prepared(
    plan: ResumePlan,
    tokens: RunTokens,
    hf_config: PretrainedConfig,
    vocabulary: Vocabulary,
    summary: Summary,
    interrupts: Interrupts,
    memory_plan: MemoryPlan,
    phases: StartPhases,
) -> None:
    """Build the model, resume, train, evaluate and export. Every rank calls.

    Args:
        plan: how the run starts, with its options.
        tokens: packed tokens of the run.
        hf_config: configuration of the model.
        vocabulary: tokenizer of the run.
        summary: summary to fill and write.
        interrupts: signals that this process has received.
        memory_plan: planned memory of this rank.
        phases: phases of the start that are over.
    """
    config = plan.config
    backend.set_tf32(config.trainer.allow_tf32)
    memory_plan = memory_plan.before_model()
    # The checkpoint is loaded last: it needs the optimizer, whose states are created for the
    # parameters that parallelize has made final.
    model = build_model(config, hf_config)
    phases.end("model")
    load_initial_weights(model, config, hf_config, plan.base)
    lora_notes = apply_lora(model, config)
    fp8_notes = apply_fp8(model, config)
    warm_notes = load_warm_start(model, plan)
    require_fp16_range(model)
    phases.end("weights")
    whole = whole_model(model)
    line_of_model, lines_of_training = model_line(whole, config), training_lines(whole, config)
    optimizer, forward_backward = parallelize(model, config)
    phases.end("optimizer")
    if not model.stages.is_whole:
        # Weights are drawn; from here on stages draw other numbers, for dropout.
        model_parallel_manual_seed(config.trainer.seed, per_stage=True)
    training = Training(model, optimizer, forward_backward, plan, tokens)
    if is_extracting_graphs():
        extract_graphs(training, config)
        return

    with model_files(model, vocabulary) as training.files:
        data_lines, packing_lines = tokens.describe(plan)
        # What the run is comes first, then how it is done.
        notes = [
            line_of_model,
            *data_lines,
            *run_lines(config),
            *lines_of_training,
            held_out_line(config.data, held_out_text(training, config)),
            *packing_lines,
            *conversation_notes(training, config, vocabulary),
            *lora_notes,
            *fp8_notes,
            *describe_step(model, config),
            *vocabulary.notes,
            *warm_notes,
            *plan.notes,
            *resume(training),
            *find_adapter_base(training, hf_config, vocabulary),
        ]
        with open_reporter(training, config, notes, memory_plan.planned_bytes) as reporter:
            phases.end("report and resumption")
            answers = SampledAnswers(training, config, vocabulary, reporter)
            train_and_evaluate(training, config, reporter, answers, summary, interrupts, phases)
            summary.measured_memory_bytes = memory_plan.measured_bytes(summary.peak_memory_bytes[0])
            finish(training, config, reporter, summary, vocabulary)


def train_and_evaluate(
    training: Training,
    config: TrainConfig,
    reporter: Reporter,
    answers: SampledAnswers,
    summary: Summary,
    interrupts: Interrupts,
    phases: StartPhases,
) -> None:
    """Evaluate, train, and evaluate again; fill ``summary``. Every rank calls."""
    summary.held_out_loss_before = evaluate_before(training, config, reporter)
    answers.before_training()
    find_best(training, config, reporter)
    evaluate_missed(training, config, reporter)
    phases.end("first evaluation")
    # The reported peak is of training alone, without loading and the first evaluation.
    backend.reset_peak_memory_stats()
    with gc_frozen():
        train(training, config, reporter, interrupts, phases)
    summary.peak_memory_bytes = peak_bytes_of_all_ranks()
    summary.freed_memory_bytes = backend.freed_bytes_kept()
    summary.held_out_loss_after = evaluate(training, config, reporter)
    answers.after_training()
    if config.trainer.keep_best:
        training.improves(summary.held_out_loss_after)
    if not reporter.evaluated_same_tokens(0, training.step):
        reporter.say("the held-out tokens have changed since step 0: the summary has no held_out_change_percent")
        summary.held_out_loss_before = None


def open_reporter(training: Training, config: TrainConfig, notes: list[str], planned_bytes: int | None) -> Reporter:
    """Return the reporter of a run that trains from ``training.step`` on, and print its setup."""
    first_step = training.step
    # Every rank gets a reporter, so the calls need no condition; all but rank 0's do nothing.
    with raise_together("reading the records of earlier steps"):
        reporter = Reporter(
            config,
            enabled=is_rank_zero(),
            first_step=first_step,
            continues=training.plan.continues,
            planned_memory_bytes=planned_bytes,
        )
    for note in notes:
        reporter.say(note)
    if first_step:
        reporter.say(f"resuming after step {first_step}")
    return reporter


def train(
    training: Training, config: TrainConfig, reporter: Reporter, interrupts: Interrupts, phases: StartPhases
) -> None:
    """Train from ``training.step`` to ``max_steps``, with evaluations and checkpoints."""
    trainer = config.trainer
    # A finished run that is started again trains nothing and does not write its last checkpoint a
    # second time; only evaluation and export run.
    if training.step == trainer.max_steps:
        interrupts.message = message_after_training(config)
        return
    # Of a signal after an error, such as torchrun sends to a rank when another one has failed.
    interrupts.message = "during training: start the same command to continue from the last checkpoint"
    tokens = training.tokens.training_sequences()
    training.tokens.interrupt_by(lambda: interrupts.first)
    tokens_per_step = config.data.global_batch_size * config.data.seq_length
    reporter.tokens_per_step = tokens_per_step
    metrics = DeferredMetrics(
        reporter,
        every=trainer.log_every_n_steps,
        tokens_per_step=tokens_per_step,
        trained=training.trained,
        utilization_per_token=utilization_per_token(config, cast("PretrainedConfig", training.model.config)),
    )
    with interrupts.deferred(), Saver(training, config) as saver:
        stopping = Stopping(training, config, saver, interrupts)
        profiled = ProfiledSteps(training, config, phases, reporter.say)
        first_step = training.step + 1
        while training.step < trainer.max_steps:
            metrics.start()
            try:
                batches = next_batches(training, config, tokens, reporter)
            except WaitStoppedError as stop:
                metrics.read()
                stopping.stop_waiting(stop.number)
            with profiled.step():
                result = run_step(training, config, batches)
            if training.step == first_step:
                backend.synchronize()
                phases.end(FIRST_STEP)
            metrics.add(result)
            profiled.raise_if_finished()
            saver.after_step()
            # ``run`` evaluates after the last step, so the loop does not. All conditions depend on
            # the step and on rank 0's decision: every rank takes the same branches, which contain
            # collectives.
            is_last = training.step == trainer.max_steps
            saves = stopping.after_step() or is_last or is_due(training.step, trainer.save_interval)
            evaluates = not is_last and not stopping.stops and is_due(training.step, trainer.val_check_interval)
            # Read before the evaluation, so its time does not count as training time, and before
            # the checkpoint: read raises for a loss that is not finite, so none is saved after
            # it.
            if evaluates or saves:
                metrics.read()
            if evaluates:
                with stopping.evaluation():
                    loss = evaluate(training, config, reporter, stopping.before_batch)
                    saves |= trainer.keep_best and training.improves(loss)
            if saves or stopping.stops:
                stopping.save()
            stopping.raise_if_stopped()
        interrupts.message = message_after_training(config)


def next_batches(
    training: Training, config: TrainConfig, tokens: MixedSequences, reporter: Reporter
) -> list[MicroBatch]:
    """Return this rank's micro-batches of the next step; wait for their tokens, and report a new epoch."""
    first = training.plan.position(training.step)
    batches = micro_batches(config.data, tokens, first)
    # The start report has the first epoch.
    if training.step:
        for epoch in tokens.begun_epochs(range(first, first + config.data.global_batch_size)):
            reporter.say(f"{epoch} begins in step {training.step + 1}")
    return batches


def run_step(training: Training, config: TrainConfig, batches: Sequence[MicroBatch]) -> StepResult:
    """Run one optimizer step, with what routers of experts need before. Every rank calls."""
    forward_backward = training.forward_backward
    if not isinstance(forward_backward, ExpertForwardBackward):
        return train_step(training, config, batches)
    with forward_backward.balanced_over(batches):
        return train_step(training, config, batches)


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


def is_due(step: int, interval: int | str) -> bool:
    """Return whether ``step`` is a multiple of ``interval``; always False for 0 and ``auto``."""
    return isinstance(interval, int) and interval > 0 and step % interval == 0


def evaluate(
    training: Training,
    config: TrainConfig,
    reporter: Reporter,
    before_batch: Callable[[], None] = lambda: None,
) -> float | None:
    """Compute, record and return the held-out loss. Every rank calls."""
    loss = held_out_loss(training, config, before_batch=before_batch)
    if training.step == 0:
        require_finite_weights(loss, config)
    if loss is not None:
        text = held_out_text(training, config)
        assert text is not None
        reporter.evaluation(training.step, loss, text)
    return loss


def evaluate_before(training: Training, config: TrainConfig, reporter: Reporter) -> float | None:
    """Return the held-out loss at step 0, recorded if the run is resumed. Every rank calls."""
    # Rank 0 alone reads evaluation.jsonl; the other ranks receive its value.
    recorded = from_rank_zero(reporter.recorded_evaluation(0))
    if training.step == 0:
        return evaluate(training, config, reporter)
    # The initial weights of a resumed run no longer exist, so their loss can only be looked up.
    return recorded


def evaluate_missed(training: Training, config: TrainConfig, reporter: Reporter) -> None:
    """Evaluate after the step that a resumed run starts from, if an interruption prevented it."""
    step = training.step
    recorded = from_rank_zero(reporter.recorded_evaluation(step))
    is_inside = 0 < step < config.trainer.max_steps
    if is_inside and is_due(step, config.trainer.val_check_interval) and recorded is None:
        loss = evaluate(training, config, reporter)
        # The checkpoint of this step is in another directory if the run of that directory is continued.
        if config.trainer.keep_best and training.plan.continues:
            training.improves(loss)


def find_best(training: Training, config: TrainConfig, reporter: Reporter) -> None:
    """Set ``training.best`` to the best of the checkpoints that a resumed run has. Every rank calls."""
    if not config.trainer.keep_best:
        return
    best: tuple[int, float] | None = None
    with raise_together("reading the held-out losses of checkpoints"):
        if is_rank_zero():
            steps = complete_steps(config.trainer.checkpoint_directory)
            best = reporter.best_evaluation(steps, held_out_text(training, config))
    shared = from_rank_zero(best)
    training.best = shared and (shared[0], shared[1])


def finish(
    training: Training,
    config: TrainConfig,
    reporter: Reporter,
    summary: Summary,
    vocabulary: Vocabulary,
) -> None:
    """Export the model, verify the export, and write and show the summary. Every rank calls."""
    directory = config.trainer.export_directory
    training.optimizer.finish_update()
    if config.trainer.export:
        assert training.files is not None
        write_adapters(training, config)
        # adapters are not merged into weights that are stored in float8
        if config.lora.base_dtype is None:
            export(training.model, vocabulary, directory, training.files)
            summary.export = str(directory)
    # Rank 0 alone loads the export with transformers. The other ranks wait in raise_together and
    # end with its error if that fails.
    with raise_together("finishing"):
        if is_rank_zero():
            if config.trainer.export == "verify":
                summary.transformers_held_out_loss = held_out_loss_by_transformers(directory, training, config)
            summary.steps = training.step
            if training.best is not None:
                step, summary.best_held_out_loss = training.best
                checkpoints = config.trainer.checkpoint_directory
                summary.best_checkpoint = str(step_directory(checkpoints, step))
                # The last evaluation may have found a better one than the last save knew.
                prune(checkpoints, config.trainer.keep_checkpoints, step)
            summary.tokens_per_s = reporter.mean_tokens_per_s()
            if summary.tokens_per_s is None:
                summary = summary.with_recorded(Path(config.trainer.output_dir))
            summary.write(Path(config.trainer.output_dir))
            reporter.show(summary.table())
            # Last, so that nothing is lost: checkpoint, export and summary are complete.
            require_verified(summary, config)


def extract_graphs(training: Training, config: TrainConfig) -> None:
    """Run the graphs of evaluation and training once, for ``neuron_parallel_compile`` to collect.

    The device computes nothing in this mode, so no value is checked, and no checkpoint, metric or
    export is written.
    """
    steps = min(EXTRACTED_STEPS, config.trainer.max_steps)
    if is_rank_zero():
        print(f"NEURON_EXTRACT_GRAPHS_ONLY: {steps} steps for their graphs; no value is checked, nothing is saved")
    held_out_loss(training, config)
    tokens = training.tokens.training_sequences()
    for step in range(steps):
        batches = micro_batches(config.data, tokens, training.plan.position(step))
        # Stages need more for every kind of exchange: those of the steady state begin after P - 1.
        stages = config.parallel.pipeline_model_parallel_size
        run_step(training, config, batches[: EXTRACTED_MICRO_BATCHES * stages])
    # Again after training: the parameters are now outputs of the update's graph, so the
    # evaluation may have a different graph than before.
    held_out_loss(training, config)
    backend.synchronize()
