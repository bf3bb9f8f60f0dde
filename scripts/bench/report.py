"""Makes the performance tables from recorded rows.

python -m scripts.bench.report            # exit 1 if README.md, its picture or docs/benchmarks.md is out of date
python -m scripts.bench.report --write
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.bench.report_picture import picture
from scripts.bench.report_sections import BENCHMARKS, DEVICE, OTHER_DEVICE, ROOT, Row, rows_of, sections

README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", BENCHMARKS / "train_step.svg"
README_SETTINGS = (  # model, T, tokens
    ("llama3-8b", "1", "8192"),
    ("llama3-8b", "1", "32768"),
    ("llama3-8b", "2", "8192"),
    ("llama3-8b", "4", "8192"),
    ("gpt-neox-20b", "2", "8192"),
    ("gpt-neox-20b", "4", "8192"),
)
OPTIMIZER = (
    "AdamW with bf16 parameters, gradients and states (8 bytes per parameter; 6 where the setting has the optimizer in "
    "backward, which keeps no gradients)"
)
FLOAT8 = (
    f"{DEVICE}, batch 1, the same optimizer; the variants of a setting ran one after the other in one run. Ours in "
    "float8 is one CUDA graph. MFU is not shown: its peak is bf16's. [Precision](precision.md) says what is rounded."
)
BEGIN, END = "<!-- made by scripts.bench.report -->\n", "<!-- end -->\n"


def latest_races(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return for each setting the rows of its last run that has the fastest peer so far.

    Only rows of one run are compared. The ``recompute`` of ours and of the peers is part of the
    setting. A later run without the fastest peer, or a faster one, would flatter ours.
    """
    latest: dict[tuple[str, ...], list[Row]] = {}
    for run, race in _runs(rows, keys).items():
        peers = [row for row in race if not _is_ours(row["variant"])]
        ours = [row for row in race if _is_ours(row["variant"])]
        if ours and peers:
            setting = (*run[: len(keys)], *(each[0].get("recompute", "") for each in (peers, ours)))
            if setting not in latest or _is_as_strong(peers, latest[setting]):
                latest[setting] = race
    return [latest[setting] for setting in sorted(latest, key=_with_numbers)]


def _runs(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of each setting and run."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        # a failed variant does not replace the result of an earlier run
        if row.get("tokens_per_s_per_device") or row.get("ms"):
            run = tuple(row[key] for key in (*keys, "date", "commit", "command"))
            runs.setdefault(run, []).append(row)
    return runs


def _is_as_strong(peers: Sequence[Row], earlier: Sequence[Row]) -> bool:
    """Return whether ``peers`` have the fastest peer of ``earlier``, or a faster one."""
    best = max((row for row in earlier if not _is_ours(row["variant"])), key=speed_of)
    return any(row["variant"] == best["variant"] or speed_of(row) > speed_of(best) for row in peers)


def speed_of(row: Row) -> float:
    """Return tokens per second of a step, or calls per millisecond of an operation."""
    return float(row.get("tokens_per_s_per_device") or 1 / float(row["ms"]))


def _with_numbers(setting: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Return a sort key that orders numbers by value, so 8192 comes before 32768."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in setting)


def fastest_pairs(settings: Sequence[tuple[str, str, str]] | None = None) -> list[tuple[Row, Row]]:
    """Return ours and the fastest peer of each race of full training steps; with ``settings`` one pair for each."""
    rows = [row for row in bf16_steps() if row.get("expert_parallel", "") in ("", "1")]
    races = latest_races(rows, ("model", "tensor_parallel", "tokens"))
    if settings is not None:
        by_setting: dict[tuple[str, str, str], list[Row]] = {}
        for race in races:
            key = (race[0]["model"], race[0]["tensor_parallel"], race[0]["tokens"])
            by_setting.setdefault(key, race)
        races = [by_setting[setting] for setting in settings if setting in by_setting]
    pairs: list[tuple[Row, Row]] = []
    for race in races:
        ours = [row for row in race if _is_ours(row["variant"])]
        peers = [row for row in race if not _is_ours(row["variant"])]
        pairs.append((max(ours, key=speed_of), max(peers, key=speed_of)))
    return pairs


def bf16_steps() -> list[Row]:
    """Return the rows of full training steps whose matmuls are in bf16."""
    return [row for row in rows_of("train_step") if not _is_float8(row)]


def _is_float8(row: Row) -> bool:
    return "fp8" in row["variant"] or "torchao" in row["variant"]


def float8_lines() -> list[str]:
    """Return a table of the last runs with steps in float8 and in bf16, those with a peer first; empty without any."""
    latest: dict[tuple[str, ...], list[Row]] = {}
    for run, race in _runs(rows_of("train_step"), ("model", "tensor_parallel", "tokens")).items():
        ours = [_is_float8(row) for row in race if _is_ours(row["variant"])]
        # A later run without the peer would flatter ours.
        if any(ours) and not all(ours) and (_has_peer(race) or not _has_peer(latest.get(run[:3], []))):
            latest[run[:3]] = race
    lines = [
        "| model | T | tokens | variant | ms | tokens/s/GPU | of ours in bf16 | GiB | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for setting in sorted(latest, key=_with_numbers):
        race = latest[setting]
        in_bf16 = max(speed_of(row) for row in race if _is_ours(row["variant"]) and not _is_float8(row))
        for row in race:
            cells = [row["model"], row["tensor_parallel"], f"{int(row['tokens']):,}", row["variant"], row["step_ms"]]
            cells += [f"{speed_of(row):,.0f}", f"{speed_of(row) / in_bf16:.2f}", row["peak_gib"], row["commit"]]
            lines.append(f"| {' | '.join(cells)} |")
    return lines if latest else []


def _has_peer(race: Sequence[Row]) -> bool:
    return not all(_is_ours(row["variant"]) for row in race)


def step_lines(settings: Sequence[tuple[str, str, str]] | None = None) -> list[str]:
    """Return a table of full training steps; with ``settings`` only these, one line each."""
    lines = [
        "| model | T | tokens | setting | ours: tokens/s/GPU | MFU | GiB "
        "| best peer: tokens/s/GPU | GiB | ratio | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ours, peer in fastest_pairs(settings):
        speed, other = speed_of(ours), speed_of(peer)
        setting = ours["recompute"] + ours["variant"].removeprefix("ours")
        cells = [ours["model"], ours["tensor_parallel"], f"{int(ours['tokens']):,}", setting, f"{speed:,.0f}"]
        cells += [
            ours["mfu"],
            ours["peak_gib"],
            f"{peer['variant']}{_if_other_recompute(peer, ours)}: {other:,.0f}{_if_other_loss(peer, ours)}",
            peer["peak_gib"],
            f"{speed / other:.2f}",
            ours["commit"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _if_other_recompute(peer: Row, ours: Row) -> str:
    """Return the peer's recompute setting as text if it differs from ours."""
    first = [row["recompute"].partition(",")[0] for row in (peer, ours)]
    return "" if first[0] == first[1] else f", recompute {peer['recompute']}"


def _if_other_loss(peer: Row, ours: Row) -> str:
    """Return both losses as text if one fell by less than 0.8 of the other: the steps compute different things."""
    losses = [row.get(name) for row in (peer, ours) for name in ("first_loss", "loss")]
    if not all(losses):
        return ""
    peer_first, peer_last, first, last = (float(loss) for loss in losses if loss)
    falls = sorted((peer_first - peer_last, first - last))
    return "" if falls[0] >= 0.8 * falls[1] else f" (loss {peer_last:.2f}, ours {last:.2f})"


def expert_steps() -> list[Row]:
    """Return the steps of each model with experts, of the last day on which several GPUs divided its experts."""
    rows = rows_of("train_step")
    days = {row["model"]: row["date"] for row in rows if row.get("expert_parallel", "") not in ("", "1")}
    return [row for row in rows if days.get(row["model"]) == row["date"]]


def variant_lines(rows: Sequence[Row]) -> list[str]:
    """Return a table of steps, a line for each variant that was measured."""
    lines = [
        "| model | GPUs | tokens | variant | recompute | tokens/s/GPU | MFU | GiB | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["model"], _layout(row), f"{int(row['tokens']):,}", row["variant"], row["recompute"]]
        if row["failure"]:
            cells += ["out of memory" if "OutOfMemory" in row["failure"] else "failed", "", ""]
        else:
            cells += [f"{speed_of(row):,.0f}", row["mfu"], row["peak_gib"]]
        lines.append(f"| {' | '.join([*cells, row['commit']])} |")
    return lines


def _layout(row: Row) -> str:
    """Return the parallel sizes of a row; rows of earlier commits have no expert parallelism."""
    experts = row.get("expert_parallel") or "1"
    return f"T={row['tensor_parallel']}" + ("" if experts == "1" else f", EP={experts}")


def scaling_lines() -> list[str]:
    """Return a table of ours by number of GPUs: the fastest setting of the last day measured.

    Rows of commits with uncommitted changes (``-dirty``) count only if the day has no other rows.
    """
    # The last row in sorted order wins: the last day, then clean commits, then the fastest.
    fastest: dict[tuple[str, str], dict[str, Row]] = {}
    rows = [row for row in bf16_steps() if _is_ours(row["variant"]) and row["tokens_per_s_per_device"]]

    def rank(row: Row) -> tuple[str, bool, float]:
        return row["date"], not row["commit"].endswith("-dirty"), speed_of(row)

    for row in sorted(rows, key=rank):
        fastest.setdefault((row["model"], row["tokens"]), {})[_layout(row)] = row
    layouts = {_layout(row): row for by_size in fastest.values() for row in by_size.values()}
    sizes = sorted(
        layouts, key=lambda name: [int(layouts[name].get(key) or 1) for key in ("expert_parallel", "tensor_parallel")]
    )
    lines = [f"| model | tokens | {' | '.join(sizes)} |", "|---" * (len(sizes) + 2) + "|"]
    for setting in sorted(fastest, key=_with_numbers):
        model, tokens = setting
        cells = [_scaling_cell(fastest[setting][size]) if size in fastest[setting] else "" for size in sizes]
        lines.append(f"| {model} | {int(tokens):,} | {' | '.join(cells)} |")
    return lines


def _scaling_cell(row: Row) -> str:
    setting = row["recompute"] + row["variant"].removeprefix("ours")
    how = "" if setting == "none" else f" ({setting.removeprefix('none, ')})"
    return f"{float(row['tokens_per_s_per_device']):,.0f}, {float(row['peak_gib']):.0f} GiB{how}, {row['commit']}"


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def head_lines() -> list[str]:
    """Return a table of ms, multiple of floor and GiB: columns are settings, lines variants."""
    races = latest_races(rows_of("linear_cross_entropy"), ("head", "tokens", "tensor_parallel"))
    columns = [{row["variant"]: row for row in race} for race in races]
    settings = [
        f"{race[0]['head']}, T={race[0]['tensor_parallel']}, {int(race[0]['tokens']):,} tokens" for race in races
    ]
    lines = [f"| ms, x floor, GiB | {' | '.join(settings)} |", "|---" * (len(settings) + 1) + "|"]
    for variant in dict.fromkeys(variant for column in columns for variant in column):
        cells = [_head_cell(column[variant]) if variant in column else "" for column in columns]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def _head_cell(row: Row) -> str:
    return f"{float(row['ms']):.1f}, {float(row['over_floor']):.3f}, {float(row['peak_gib']):.2f}"


def readme_section() -> str:
    """Return what is between README's markers."""
    return (
        f"Full training steps on {DEVICE} ({measured_on()}), batch 1, random weights, {OPTIMIZER}. Each line's peer "
        "ran in the same run; every setting, and its command, is in [docs/benchmarks.md](docs/benchmarks.md).\n\n"
        "![Tokens per second and peak memory of training steps: nxd_memopt and the fastest peer]"
        "(docs/benchmarks/train_step.svg)\n\n" + "\n".join(step_lines(README_SETTINGS)) + "\n"
    )


def measured_on() -> str:
    """Return the first and the last date of the recorded steps."""
    steps = rows_of("train_step")
    if not steps:
        raise ValueError(f"{BENCHMARKS / 'train_step.csv'} has no rows of {DEVICE}: the tables are made from them")
    first = min(row["date"] for row in steps)
    last = max(row["date"] for row in steps)
    return first if first == last else f"{first} to {last}"


def page() -> str:
    """Return docs/benchmarks.md."""
    float8 = float8_lines()
    parts = [
        "# Benchmarks",
        "Written by `python -m scripts.bench.report --write` from the rows in `docs/benchmarks/`.",
        "## Full training steps",
        f"{DEVICE}, {measured_on()}, batch 1, random weights, {OPTIMIZER}. Each line's peer ran in the same run, the "
        "last run that contains the setting's fastest peer or a faster one. Eager steps of 2,048 tokens are limited by "
        "the host, whose speed differs between runs. Ours uses FlashAttention-4 where the rows' `peers` list it as "
        "installed; a peer uses it where its name says so. Losses are shown where they differ. Versions and commands: "
        "[train_step.csv](benchmarks/train_step.csv).",
        "\n".join(step_lines()),
        *(["### Matmuls in float8", FLOAT8, "\n".join(float8)] if float8 else []),
        f"### One {OTHER_DEVICE}",
        "Batch 1, the same optimizer; all variants of a model and length ran one after the other on one machine.",
        "\n".join(variant_lines(rows_of("train_step", OTHER_DEVICE))),
        "### Experts on several GPUs",
        f"{DEVICE}, batch 1 on each data-parallel rank, the same optimizer; T x EP GPUs. `ours` has the dispatcher "
        "`allgather`. Rows of two GPUs of b5657f0 were measured on two of the four GPUs of a host, while the other two "
        "ran another benchmark.",
        "\n".join(variant_lines(expert_steps())),
        "## By number of GPUs",
        "Ours, tokens/s/GPU and GiB, in the fastest setting of the last day on which each was measured, with its "
        "commit: figures of different commits do not show how the code scales.",
        "\n".join(scaling_lines()),
    ]
    parts += [
        "## Linear layer + cross entropy",
        "Forward and backward: milliseconds, multiple of the floor (its three matmuls), GiB above the inputs "
        "([rows](benchmarks/linear_cross_entropy.csv)). `liger n`: `chunk_mem_const`.",
        "\n".join(head_lines()),
    ]
    return "\n\n".join(parts + sections()) + "\n"


def with_section(text: str) -> str:
    """Return ``text`` with ``readme_section()`` between its markers.

    Raises:
        ValueError: a marker is missing, or occurs twice.
    """
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            raise ValueError(
                f"README.md has {text.count(marker)} lines {marker.strip()!r}, it must have one: put it back"
            )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{readme_section()}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables and the picture")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    made = with_section(text)
    files = {README: made, PAGE: page(), PICTURE: picture(fastest_pairs(README_SETTINGS), speed_of)}
    if args.write:
        for file, content in files.items():
            file.write_text(content, encoding="utf-8")
        return 0
    different = [
        file.name for file, content in files.items() if not file.exists() or file.read_text("utf-8") != content
    ]
    if different:
        print(f"{different} differ from the rows of docs/benchmarks: run python -m scripts.bench.report --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
