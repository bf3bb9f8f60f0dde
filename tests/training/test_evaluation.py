"""Where the export is verified."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nxd_memopt.backends import backend
from nxd_memopt.training.evaluation import fits_device


@pytest.mark.parametrize(("free_bytes", "fits"), [(None, True), (400, True), (399, False)])
def test_an_export_that_does_not_fit_next_to_training_is_verified_on_the_host(
    free_bytes: int | None, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(100))
    (tmp_path / "tokenizer.json").write_bytes(bytes(1000))
    transfers = None if free_bytes is None else SimpleNamespace(free_bytes=lambda: free_bytes)
    monkeypatch.setattr(backend, "host_transfers", lambda: transfers)
    assert fits_device(tmp_path) is fits
