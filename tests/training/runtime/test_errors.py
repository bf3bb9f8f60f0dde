"""What the one line of an error says beyond its message."""

from __future__ import annotations

import json

import pytest

from nxd_memopt.config import require_divisible
from nxd_memopt.launch.agent import FAILED_S
from nxd_memopt.profiling import ProfileRequest
from nxd_memopt.training.runtime import errors
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


def test_notes_follow_the_message() -> None:
    error = ValueError("a is 1")
    error.add_note("on stage 0\nof 2")
    assert text_of(error) == "a is 1; on stage 0 of 2"


@pytest.mark.parametrize("shows", ["0", "1"])
def test_the_error_of_a_lost_rank_waits_for_the_launcher(monkeypatch: pytest.MonkeyPatch, shows: str) -> None:
    """gloo's text; the launcher ends the rank during the wait, so that the cause alone is shown."""
    waits: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waits.append)
    monkeypatch.setenv("NXD_MEMOPT_TRACEBACK", shows)
    with pytest.raises(RuntimeError) as raised, user_errors():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer")
    assert any(wait > FAILED_S for wait in waits) == (shows == "0")
    assert "connection to another rank is lost" in raised.value.__notes__[0]
    waits.clear()
    with pytest.raises(RuntimeError, match="the cause"), user_errors():
        raise RuntimeError("the cause")
    assert not waits
