"""The command ``nxd-memopt prepare``: tokenizes all text of a configuration before a run, which then only reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nxd_memopt._optional import require_installed, require_transformers
from nxd_memopt.command_line import Parser, count
from nxd_memopt.training.runtime.distributed import available_cores
from nxd_memopt.training.runtime.signals import Interrupted, Interrupts, exit_status

if TYPE_CHECKING:
    from nxd_memopt.training.config.train_config import TrainConfig
    from nxd_memopt.training.reporting.tokenizing import Display

PROGRAM = "nxd-memopt prepare"
STOPPED = "while it tokenized: start the same command to go on after the last complete window"


def main(arguments: Sequence[str]) -> int:
    """Tokenize the text of a run to its end; return the exit status.

    The tokens are in the directory in which the run with the same options looks for them, and do not depend on
    the number of processes.
    """
    # A window is complete in a file or absent, so a stop loses at most the window in progress.
    interrupts = Interrupts()
    interrupts.message = STOPPED
    try:
        with interrupts.handled():
            _prepare(arguments)
    except Interrupted as stop:
        print(stop.line(), flush=True)
        return exit_status(stop.number)
    return 0


def _prepare(arguments: Sequence[str]) -> None:
    """Check the packages and the options, and tokenize."""
    cores = available_cores()
    parser = Parser("prepare", "Tokenize all text of a run before training, which then only reads it.")
    workers = f"processes that tokenize (default: {cores}, a core each)"
    parser.add_argument("--workers", type=count, default=cores, metavar="N", help=workers)
    options, train_arguments = parser.separate(arguments)
    require_installed(PROGRAM, "yaml", "rich", extra="train")
    from nxd_memopt.training.config.parsing import parse_config
    from nxd_memopt.training.inputs import require_inputs

    config = parse_config(train_arguments, program=PROGRAM)
    require_inputs(config)
    require_transformers(PROGRAM, extra="train")
    from nxd_memopt.training.data.mixture import Blend
    from nxd_memopt.training.data.sources.data_format import with_format
    from nxd_memopt.training.data.tokenize.chat import with_chat_template
    from nxd_memopt.training.model import load_hf_config, load_vocabulary
    from nxd_memopt.training.reporting.tokenizing import Display
    from nxd_memopt.training.runtime.run_lock import locked_output_directory

    # The same steps in the same order as at the start of a run: the fingerprint of the tokens, and
    # with it their directory, depends on each of them.
    hf_config = load_hf_config(config.model, config.moe)
    vocabulary = load_vocabulary(config.model, hf_config, end_of_text=config.data.end_of_text)
    config = replace(config, data=with_format(config.data))
    vocabulary = with_chat_template(vocabulary, config.data)
    blend = Blend(config.data.sources)
    held_out = blend.counts(config.data.eval_sequences)
    sources = list(zip(blend.names, blend.shares, held_out, strict=True))
    if config.data.validation_dataset is not None:
        sources = [(name, share, 0) for name, share, _ in sources]
        sources.append((config.data.validation_dataset, 0.0, config.data.eval_sequences))
    # A run that trains writes to the same directory.
    with locked_output_directory(config.trainer.output_dir), Display() as display:
        for name, share, sequences in sources:
            _prepare_source(config, name, vocabulary, display, share=share, held_out=sequences, workers=options.workers)
        print(display.totals(), flush=True)


def _prepare_source(
    config: TrainConfig, name: str, vocabulary: Any, display: Display, *, share: float, held_out: int, workers: int
) -> None:
    """Tokenize the text of a source, or of ``data.validation_dataset``.

    Args:
        config: options of the run.
        name: one of its sources.
        vocabulary: ``Vocabulary`` of the run.
        display: shows the progress.
        share: part of the trained sequences that are of this source; 0 of the validation text.
        held_out: held-out sequences of this source.
        workers: processes that tokenize.
    """
    from nxd_memopt.training.data.packed.fingerprint import directory_of, fingerprint_of
    from nxd_memopt.training.data.packed.sequences import WindowFiles
    from nxd_memopt.training.data.packed.writer import ALL_SEQUENCES, TokenJob, write_tokens
    from nxd_memopt.training.data.sources.corpora import open_corpus
    from nxd_memopt.training.data.tokenize.encoding import DocumentEncoder
    from nxd_memopt.training.data.tokenize.windows import described
    from nxd_memopt.training.data.tokenize.workers import TokenWorkers

    data, seed = config.data.of_source(name), config.trainer.seed
    corpus = open_corpus(data, seed)
    fingerprint = fingerprint_of(config, name, corpus, vocabulary)
    directory = directory_of(config.trainer.tokens_directory, fingerprint)
    directory.mkdir(parents=True, exist_ok=True)
    # Of training to the end of the text, whatever the number of steps.
    wanted = {"train": ALL_SEQUENCES if share else 0, "held_out": held_out}
    job = TokenJob(directory, fingerprint, corpus.fingerprint, data, vocabulary, seed, wanted, not share)
    with TokenWorkers(DocumentEncoder(vocabulary, data), workers) as started:
        write_tokens(job, corpus, display.of(name), workers=started)
    split = "train" if share else "held_out"
    windows = WindowFiles(directory, split, fingerprint)
    windows.count = windows.written()
    known = windows.last
    of_source = f" of {name}" if share < 1 else ""
    documents = f"{known.documents:,} documents{of_source}"
    line = f"prepared {known.rows:,} sequences of {data.seq_length:,} tokens from {documents} in {directory}: "
    if share:
        # Of a mixture, a step has this source's share of the batch.
        steps = known.rows / (data.global_batch_size * share)
        print(f"{line}an epoch has {steps:,.1f} steps of {data.global_batch_size:,} sequences", flush=True)
    else:
        print(f"{line}held-out text", flush=True)
    if data.has_conversations:
        print(f"conversations: {described(known.outcomes)}", flush=True)
