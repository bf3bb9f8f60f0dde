"""Tags of one process: what killed, failed and other programs' saves leave in the directory."""

from __future__ import annotations

import warnings

import pytest

from nxd_memopt import trainer
from nxd_memopt.checkpoint import pickled
from tests.reference import assert_says, error_message


class KilledError(BaseException):
    pass


def killed(path):
    raise KilledError


def test_a_kill_while_the_manifest_is_written_leaves_the_other_tags(tmp_path, monkeypatch):
    """The manifest is complete or absent, also for a reader that looks meanwhile."""
    trainer.neuronx_distributed_config()
    trainer.save_checkpoint(tmp_path, "first", user_content={"step": 1})
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        # write_manifest flushes what it has written first
        patched.setattr(pickled, "flush_to_disk", lambda path: killed(path) if "manifest" in path.name else None)
        trainer.save_checkpoint(tmp_path, "second", user_content={"step": 2})
    assert not (tmp_path / ".second.incomplete" / "manifest.json").exists()
    (tmp_path / ".second.incomplete" / "manifest.json").write_text("")  # as earlier versions left it
    assert trainer.has_checkpoint(tmp_path)
    assert trainer.load_checkpoint(tmp_path) == {"step": 1}
    trainer.save_checkpoint(tmp_path, "third", user_content={"step": 3}, num_kept_ckpts=2)
    assert trainer.load_checkpoint(tmp_path) == {"step": 3}


def test_manifests_that_cannot_be_read_are_named(tmp_path):
    """A damaged one when the newest tag is searched, another program's only when its directory is asked for."""
    trainer.neuronx_distributed_config()
    for step in (1, 2):
        trainer.save_checkpoint(tmp_path, f"step_{step}", user_content={"step": step})
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text("[]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer.load_checkpoint(tmp_path) == {"step": 2}
        assert trainer.load_checkpoint(tmp_path, "step_1") == {"step": 1}
    assert_says(error_message(lambda: trainer.load_checkpoint(tmp_path, "web")), "web/manifest.json", "JSON object")
    (tmp_path / "step_2" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match=r"step_2 is taken for an incomplete checkpoint: .*step_2/manifest.json"):
        assert trainer.load_checkpoint(tmp_path) == {"step": 1}
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, "step_2"))
    assert_says(message, "step_2/manifest.json cannot be read")
