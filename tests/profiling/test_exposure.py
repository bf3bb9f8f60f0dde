"""What of a profile counts as exposed communication."""

import pytest

from nxd_memopt.profiling.exposure import exposure


def test_only_time_without_computation_is_exposed():
    found = exposure(
        [
            ("gemm", 0, 10),
            ("ncclDevKernel_AllGather", 8, 14),  # 4 exposed
            ("Memcpy PtoP (Device -> Device)", 12, 15),  # 1 more
            ("gemm", 16, 20),  # 1 idle before it
            ("wait_signal_kernel", 18, 19),  # hidden
            ("wait_for_signals", 20, 22),  # 2 more
            ("Memcpy DtoD (Device -> Device)", 10, 22),  # own rows beside those sent
            ("Memcpy DtoH (Device -> Pinned)", 0, 30),  # offloading
        ]
    )
    assert found == pytest.approx({"compute": 14, "exposed_communication": 7, "idle": 1})
    assert exposure([]) == {"compute": 0, "exposed_communication": 0, "idle": 0}
