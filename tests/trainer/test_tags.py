"""Tags of one process: what killed, failed and other programs' saves leave in the directory."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from nxd_memopt import trainer
from nxd_memopt.checkpoint import directories, pickled
from nxd_memopt.checkpoint.nxd.architectures import build_rules
from nxd_memopt.checkpoint.nxd.parts import Layout
from nxd_memopt.checkpoint.nxd.writing import Target, write_weights
from nxd_memopt.trainer import tags
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
        patched.setattr(directories, "flush_to_disk", lambda path: killed(path) if "manifest" in path.name else None)
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


def save_tag(path, *, xser):
    trainer.neuronx_distributed_config()
    model = nn.Linear(3, 2)
    trainer.save_checkpoint(path.parent, path.name, model, torch.optim.SGD(model.parameters()), use_xser=xser)


def convert_weights(path, *, xser):
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    config = {"model_type": "llama", **dict(zip(sizes, (8, 8, 2, 1, 8), strict=True))}
    parts = [part for rule in build_rules(config, Layout(1), "separate") for part in rule.parts]
    sources = {part.name: torch.ones(part.shape) for part in parts}
    write_weights(sources, config, path, Target(Layout(2), xser=xser), lambda line: None)


@pytest.mark.parametrize(("write", "xser"), [(save_tag, False), (convert_weights, True)])
def test_every_file_is_on_the_disk_before_the_checkpoint_is_marked_complete(write, xser, tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync

    def recorded(descriptor):
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    write(tmp_path / "tag", xser=xser)
    marked = flushed.index((tmp_path / "tag" / "done").stat().st_ino)
    paths = [path for path in (tmp_path / "tag").rglob("*") if path.suffix == ".pt" or path.is_dir()]
    assert len(paths) > (9 if xser else 1)
    assert [path.name for path in paths if path.stat().st_ino not in flushed[:marked]] == []
    assert (tmp_path / "tag").stat().st_ino in flushed[marked:]


def test_the_next_save_removes_what_earlier_ones_left_incomplete(tmp_path, monkeypatch):
    """Of this process and of one that was killed, but not what another program named so."""
    trainer.neuronx_distributed_config()
    child = (
        "import os, sys, torch\n"
        "from nxd_memopt import trainer\n"
        "from nxd_memopt.checkpoint import pickled\n"
        "pickled.flush_to_disk = lambda path: os._exit(9)\n"
        "trainer.neuronx_distributed_config()\n"
        "trainer.save_checkpoint(sys.argv[1], 'killed', {'w': torch.ones(2)})\n"
    )
    ended = subprocess.run([sys.executable, "-c", child, str(tmp_path)], check=False)
    assert ended.returncode == 9 and (tmp_path / ".killed.incomplete").is_dir()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space left"):
        patched.setattr(pickled, "write_tensors", full_disk)
        trainer.save_checkpoint(tmp_path, "failed", {"w": torch.ones(2)})
    assert (tmp_path / ".failed.incomplete").is_dir()
    (tmp_path / ".other_program.incomplete").mkdir()
    trainer.save_checkpoint(tmp_path, "tag", {"w": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other_program.incomplete", "tag"]
    assert not list((tmp_path / "tag").glob(".*"))


def test_a_kill_while_old_checkpoints_are_removed_leaves_nothing(tmp_path, monkeypatch):
    trainer.neuronx_distributed_config()
    for tag in ("a", "b"):
        trainer.save_checkpoint(tmp_path, tag, {"w": torch.ones(2)})
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(tags, "remove_directory", killed)
        tags.prune_tags(tmp_path, 1)
    assert list(tags.complete_tags(tmp_path)) == ["b"]
    trainer.save_checkpoint(tmp_path, "c", {"w": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


def full_disk(path, content):
    raise OSError("no space left")


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    for tag in ("data", "notes"):
        (tmp_path / "notes").write_text("mine")
        message = error_message(lambda tag=tag: trainer.save_checkpoint(tmp_path, tag, model=nn.Linear(1, 1)))
        assert_says(message, str(tmp_path / tag), "no checkpoint", "rename it")
    assert (tmp_path / "data" / "thesis.txt").read_text() == (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("async_save", [False, True])
def test_tied_weights_are_stored_once(async_save, tmp_path):
    """Tensors that only share a storage are stored each; every entry has its own values."""
    trainer.neuronx_distributed_config()
    both = torch.arange(8000.0)
    state = {"embedding": both[:4000], "head": both[:4000], "rest": both[4000:], "whole": both}
    trainer.save_checkpoint(tmp_path, "tag", state, async_save=async_save)
    both_before = both.clone()
    trainer.finalize_checkpoint()
    (file,) = (tmp_path / "tag" / "model").iterdir()
    assert 16_000 * 4 < file.stat().st_size < 17_000 * 4
    loaded = torch.load(file, weights_only=True)
    parts = {"embedding": slice(4000), "head": slice(4000), "rest": slice(4000, None), "whole": slice(None)}
    assert all(torch.equal(loaded[name], both_before[part]) for name, part in parts.items())


def test_a_url_is_no_directory(tmp_path, monkeypatch):
    """It would be a directory called s3: below the current one."""
    monkeypatch.chdir(tmp_path)
    trainer.neuronx_distributed_config()
    for function in (
        lambda: trainer.save_checkpoint("s3://bucket/run", "first", user_content={"step": 1}),
        lambda: trainer.load_checkpoint("s3://bucket/run"),
        lambda: trainer.has_checkpoint("s3://bucket/run"),
    ):
        assert_says(error_message(function), "s3://bucket/run", "directory")
    assert not list(tmp_path.iterdir())
