"""Files are complete or as they were before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nxd_memopt.files import complete_file, write_text


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
    path = tmp_path / "rows.json.gz"
    path.write_text("old")
    with complete_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path and temporary.name.endswith(".json.gz")
    assert path.read_text() == "new"
    write_text(path, "nö")
    assert path.read_bytes() == "nö".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exists", [False, True])
def test_an_error_leaves_what_was_there(exists, tmp_path):
    path = tmp_path / "rows.jsonl"
    if exists:
        path.write_text("old")

    def fail() -> None:
        with complete_file(path) as temporary:
            temporary.write_text("half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fail()
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"] * exists


def test_a_link_stays_and_a_device_is_written_to(tmp_path):
    """A rename would replace the link, and as root /dev/full or /dev/stdout."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "device").symlink_to(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write_text(tmp_path / "device", "through")
        assert reader.read() == "through"
    assert pipe.is_fifo() and (tmp_path / "device").is_symlink()


def test_a_redirected_output_keeps_what_it_has(tmp_path):
    program = "from nxd_memopt.files import write_text; from pathlib import Path; print(1, flush=True); "
    program += "write_text(Path('/dev/stdout'), 'two\\n'); print(3, flush=True)"
    with (tmp_path / "log").open("a") as log:
        log.write("0\n")
        log.flush()
        subprocess.run([sys.executable, "-c", program], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "0\n1\ntwo\n3\n"
