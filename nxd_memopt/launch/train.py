"""The command ``nxd-memopt train``: trains in this process, or on the ranks that ``--nproc`` starts."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Train; return the exit status."""
    names = {argument.partition("=")[0] for argument in arguments}
    # The help is shown once, not by every rank.
    if "--nproc" in names and not names & {"-h", "--help"}:
        from nxd_memopt.launch.agent import main as start_ranks

        return start_ranks(arguments)
    from nxd_memopt.training.__main__ import main as train

    return train(arguments, program="nxd-memopt train")
