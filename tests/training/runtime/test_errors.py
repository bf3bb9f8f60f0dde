"""What the one line of an error says beyond its message."""

from __future__ import annotations

import json

import pytest

from nxd_memopt.config import require_divisible
from nxd_memopt.profiling import ProfileRequest
from nxd_memopt.training.runtime.errors import text_of, user_errors


def test_an_error_of_another_library_says_where_it_was_raised(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """As a defect would be found: the library calls another one with what this does not accept."""
    monkeypatch.setattr(json, "loads", lambda text: int(text))
    with pytest.raises(SystemExit), user_errors():
        ProfileRequest.from_json("b")
    line = capsys.readouterr().err
    assert line.startswith("error: invalid literal for int() with base 10: 'b' (raised in ")
    assert "test_errors.py:" in line and ", called by nxd_memopt/profiling/step_profiler.py:" in line
    assert line.endswith("; NXD_MEMOPT_TRACEBACK=1 shows all calls)\n") and line.count("\n") == 1


def test_errors_of_this_library_and_of_files_are_their_messages(tmp_path) -> None:
    for cause in (lambda: require_divisible("a", 3, "b", 2), lambda: (tmp_path / "absent").read_text()):
        with pytest.raises((ValueError, OSError)) as raised:
            cause()
        assert text_of(raised.value) == str(raised.value)
