"""Measures how fast ``nxd-memopt prepare`` tokenizes with one and with several processes, next to ``datasets.map``.

    python -m scripts.bench.races.tokenizing --tokenizer DIRECTORY --megabytes 16 --repeats 3 --append

The text is the source code of Python's standard library as JSON lines, repeated up to ``--megabytes``. Each process
that tokenizes is pinned to a core, and its tokenizer uses one thread. One process of ``prepare`` reads, tokenizes,
packs and writes; with more, the process that reads and packs is not pinned, so all share the same cores. The time
does not include the start of these processes, which is about 5 s. ``datasets.map`` gets parsed text and returns
token ids in Arrow files; it neither packs nor orders them.

The variants take turns. A row has the fastest of ``--repeats`` runs, and the least processor time of all processes
together. ``speedup`` is over one process of the same program, in the fastest runs. On a machine that others use, the
time has their work in it: ``cpu_speedup`` is what the processor times give if N processes share the work evenly, N
times that of one process over that of N.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packed.writer import ALL_SEQUENCES, TokenJob, write_tokens
from nxd_memopt.training.data.packing import ID_MASK
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.sources.documents import open_documents
from nxd_memopt.training.data.tokenize.encoding import DocumentEncoder
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.workers import TokenWorkers
from nxd_memopt.training.runtime.distributed import use_one_tokenizer_thread
from scripts.bench.harness.record import append, bench_parser, environment

DOCUMENTS_PER_CALL = 32
BYTES_PER_MB = 10**6


def write_text(path: Path, size: int) -> int:
    """Write about ``size`` bytes of documents as JSON lines; return the bytes of their text."""
    documents = open_documents(DataConfig("stdlib", held_out_every=0, eval_sequences=0))
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            text = documents.texts.read(number % len(documents.train))
            # Numbered: no document is the copy of another one.
            file.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")
            written += len(text.encode(errors="replace"))
            number += 1
    return written


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Let this process and those that it starts run on ``cores`` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def prepare(path: Path, vocabulary: Vocabulary, count: int, cores: Sequence[int], directory: Path) -> dict[str, float]:
    """Tokenize, pack and write the text with ``count`` processes; return seconds and processor seconds."""
    data = DataConfig(dataset=str(path), streaming=True, held_out_every=0, eval_sequences=0)
    corpus = open_corpus(data, 0)
    wanted = {"train": ALL_SEQUENCES, "held_out": 0}
    job = TokenJob(directory, corpus.fingerprint, corpus.fingerprint, data, vocabulary, 0, wanted)
    # By this clock the processes are started at the first call.
    clock = itertools.count(step=60).__next__
    with pinned(cores[:count]), TokenWorkers(DocumentEncoder(vocabulary, data), count, clock) as workers:
        # Each process has imported what it needs when it has answered a call.
        list(workers.encode(["import time"] for _ in range(4 * count)))
        ids = [process.pid for process in workers.processes if process.pid is not None]
        for core, process in zip(cores, ids, strict=False):
            os.sched_setaffinity(process, [core])
        begin_cpu_s, begin_s = used_s(ids), time.perf_counter()
        write_tokens(job, corpus, lambda line: False, workers=workers)
        seconds, cpu_s = time.perf_counter() - begin_s, used_s(ids) - begin_cpu_s
    tokens = sum(path.stat().st_size for path in directory.glob("train.*")) // 4  # with their facts, below 0.1 %
    return {"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens}


def map_dataset(
    path: Path, vocabulary: Vocabulary, count: int, cores: Sequence[int], directory: Path
) -> dict[str, float]:
    """Tokenize the text with ``datasets.map``; return seconds and processor seconds."""
    import datasets

    datasets.disable_progress_bars()
    dataset: Any = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(directory))
    tokenizer = vocabulary.tokenizer

    def encode(batch: dict[str, list[str]], rank: int | None) -> dict[str, Any]:
        os.sched_setaffinity(0, [cores[rank or 0]])
        return {"input_ids": tokenizer(batch["text"], verbose=False, return_attention_mask=False)["input_ids"]}

    begin_cpu_s, begin_s = used_s(), time.perf_counter()
    with pinned(cores[:count]):
        encoded = dataset.map(
            encode,
            batched=True,
            batch_size=DOCUMENTS_PER_CALL,
            with_rank=True,
            num_proc=count if count > 1 else None,
            remove_columns=dataset.column_names,
            load_from_cache_file=False,
        )
    seconds = time.perf_counter() - begin_s
    tokens = sum(len(row) for row in encoded["input_ids"])
    return {"seconds": seconds, "cpu_s": used_s() - begin_cpu_s, "tokens": tokens}


def used_s(processes: Sequence[int] = ()) -> float:
    """Return the processor seconds of this process, of those that it has started and that have ended, and of others."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for process in processes:
        # Fields 14 and 15 of proc(5), after the name in parentheses: user and system time.
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def load_vocabulary(directory: str) -> Vocabulary:
    """Return the tokenizer of a directory, with its end-of-text token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not tokenizer.is_fast:
        raise SystemExit(f"error: --tokenizer {directory}: the measured tokenizer is one of the tokenizers library")
    return Vocabulary(tokenizer, min(len(tokenizer), ID_MASK), tokenizer.eos_token_id)


def main() -> None:
    parser = bench_parser(__doc__, "tokenizing")
    parser.add_argument("--tokenizer", required=True, help="directory of a Hugging Face tokenizer")
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="for the text and the tokens; default a temporary one")
    parser.add_argument("--note", default="", help="recorded with the rows, such as other load on the machine")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if not 2 <= args.workers <= len(cores):
        parser.error(f"--workers must be between 2 and the {len(cores)} cores of this process, got {args.workers}")
    use_one_tokenizer_thread()
    vocabulary = load_vocabulary(args.tokenizer)
    programs: dict[str, Callable[..., dict[str, float]]] = {"nxd-memopt prepare": prepare, "datasets.map": map_dataset}
    found: dict[tuple[str, int], dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        path = Path(folder) / "text.jsonl"
        size = write_text(path, int(args.megabytes * BYTES_PER_MB))
        for _ in range(args.repeats):
            for name, program in programs.items():
                for count in (1, args.workers):
                    with tempfile.TemporaryDirectory(dir=folder) as directory:
                        run = program(path, vocabulary, count, cores, Path(directory))
                    print(name, count, {key: round(value, 2) for key, value in run.items()}, flush=True)
                    before = found.get((name, count), run)
                    found[name, count] = {key: min(run[key], before[key]) for key in run}
    rows = [
        {
            "variant": name,
            "workers": count,
            "megabytes": round(size / BYTES_PER_MB, 1),
            "tokens": int(run["tokens"]),
            "seconds": round(run["seconds"], 2),
            "mb_per_s": round(size / BYTES_PER_MB / run["seconds"], 2),
            "cpu_s": round(run["cpu_s"], 2),
            "speedup": round(found[name, 1]["seconds"] / run["seconds"], 2),
            "cpu_speedup": round(count * found[name, 1]["cpu_s"] / run["cpu_s"], 2),
            "repeats": args.repeats,
            "note": args.note,
        }
        for (name, count), run in found.items()
    ]
    for row in rows:
        print(row)
    if args.append:
        append([row | environment() for row in rows], args.csv)


if __name__ == "__main__":
    main()
