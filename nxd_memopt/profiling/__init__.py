"""Profiles of training steps: time and memory by module and category, and reports of them."""

from nxd_memopt.profiling.step_profiler import ProfileRequest, StepProfiler

__all__ = ["ProfileRequest", "StepProfiler"]
