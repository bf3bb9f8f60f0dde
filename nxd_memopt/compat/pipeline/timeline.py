"""Writes when the tasks of each stage began and ended, as a trace that browsers show (chrome://tracing)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nxd_memopt.compat import parallel_state
from nxd_memopt.parallel_layers.parallel_state import get_data_parallel_rank, get_tensor_model_parallel_rank


class Timeline:
    """Events of a rank's steps, appended to a file by rank 0 of the pipeline.

    Args:
        trace_file_path: file to append to; None records nothing.
        rank: position of the rank in the pipeline.
    """

    def __init__(self, trace_file_path: str | Path | None, rank: int) -> None:
        self.trace_file_path = trace_file_path
        self.rank = rank
        self.enabled = trace_file_path is not None
        self.step = 0
        self.current_rank_events: dict[str, dict[str, Any]] = {}
        # The format allows an array that does not end: a killed run's file can be read.
        if self.should_record and rank == 0:
            Path(str(trace_file_path)).write_text("[\n", encoding="utf-8")

    @property
    def should_record(self) -> bool:
        """Whether this rank records events."""
        return self.enabled

    def mark_event_start(self, label: str) -> None:
        """Begin the event ``label`` of this step."""
        if self.should_record:
            self.current_rank_events[label] = {"name": label, "ts": time.time() * 1e6, "pid": self.rank}

    def mark_event_end(self, label: str) -> None:
        """End the event ``label``."""
        if self.should_record:
            event = self.current_rank_events[label]
            event["dur"] = time.time() * 1e6 - event["ts"]

    def mark_step_end(self) -> None:
        """Write the events of all ranks of the pipeline. Every rank of it calls."""
        if not self.should_record:
            return
        events = self._collect_events_for_all_ranks()
        self.current_rank_events = {}
        self.step += 1
        if self.rank == 0:
            lines = [json.dumps({"ph": "X", "cat": "comp", "tid": 0, **event}) + ",\n" for event in events]
            with Path(str(self.trace_file_path)).open("a", encoding="utf-8") as file:
                file.writelines(lines)

    def _collect_events_for_all_ranks(self) -> list[dict[str, Any]]:
        return list(self.current_rank_events.values())


class PPTimeline(Timeline):
    """Timeline of a pipeline's stages; of one data-parallel and one tensor-parallel rank.

    Args:
        trace_file_path: file to append to; None records nothing.
        pp_rank: position of the rank in the pipeline.
    """

    def __init__(self, trace_file_path: str | Path | None, pp_rank: int) -> None:
        super().__init__(trace_file_path, pp_rank)
        # Creating the groups is collective: every rank of the world does.
        if self.enabled:
            parallel_state.initialize_pp_gloo_groups()

    @property
    def should_record(self) -> bool:
        """Whether this rank records events."""
        return self.enabled and get_data_parallel_rank() == 0 and get_tensor_model_parallel_rank() == 0

    def _collect_events_for_all_ranks(self) -> list[dict[str, Any]]:
        own = super()._collect_events_for_all_ranks()
        gathered = parallel_state.gather_python_object(own, parallel_state.get_pp_gloo_group())
        return [event for events in gathered for event in events]


@contextmanager
def mark_timeline(timeline: Timeline, msg: str) -> Iterator[None]:
    """Record the block as the event ``msg``."""
    timeline.mark_event_start(msg)
    try:
        yield
    finally:
        timeline.mark_event_end(msg)
