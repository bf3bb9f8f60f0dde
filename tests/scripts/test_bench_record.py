"""What a benchmark row says of the packages of its run."""

from __future__ import annotations

from scripts.bench.harness import record


def test_kernels_that_cannot_be_imported_are_not_listed_as_used(monkeypatch):
    monkeypatch.setattr(record, "installed", lambda *names: [f"{name} 1.0" for name in names])
    monkeypatch.setitem(record._KERNELS, "flash-attn-4", "no_such_kernels")
    assert "flash-attn-4 unusable" in record.usable_packages()
    assert "liger-kernel 1.0" in record.usable_packages()
    monkeypatch.setitem(record._KERNELS, "flash-attn-4", "json")
    assert "flash-attn-4 1.0" in record.usable_packages()
