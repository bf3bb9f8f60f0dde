"""neuronx-distributed's tensor files: xser without torch_xla, ``checkpointing.save`` and ``load``, bad files."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from nxd_memopt.parallel_layers import checkpointing
from nxd_memopt.parallel_layers.rank_files import find_rank_files
from nxd_memopt.parallel_layers.tensor_files import read_tensors, write_xser
from tests.nxd_fixtures import TensorReference, read_xser, reference_classes, write_rank

CONTENT = {
    "weight": torch.arange(6.0).view(2, 3),
    "nested": {"half": torch.ones(2, dtype=torch.bfloat16), "step": 3, "text": "x"},
    "groups": [torch.tensor(0.5), (1, 2)],
}


def assert_content(content):
    assert torch.equal(content["weight"], CONTENT["weight"])
    assert content["nested"]["half"].dtype == torch.bfloat16 and content["nested"]["step"] == 3
    assert content["groups"][0].item() == 0.5


# xser


@pytest.mark.parametrize("info", [False, True])
def test_xser_files_are_read_without_torch_xla(info, tmp_path):
    """Both reference classes; nothing stays allow-listed."""
    before = set(torch.serialization.get_safe_globals())
    write_rank(tmp_path / "file.pt", CONTENT, xser=True, info=info)
    assert_content(read_tensors(tmp_path / "file.pt"))
    assert set(torch.serialization.get_safe_globals()) == before


def test_written_xser_files_are_torch_xlas(tmp_path):
    """An independent loader that unpickles torch_xla's class reads them; the tensors have storage of their own.

    None of the tensors of an earlier file are left.
    """
    write_xser(tmp_path / "file", {str(i): torch.ones(1) for i in range(9)})
    view = torch.arange(1_000_000.0)[:10]
    write_xser(tmp_path / "file", {**CONTENT, "transposed": CONTENT["weight"].t(), "view": view}, info=True)
    content = read_xser(tmp_path / "file")
    assert_content(content)
    assert torch.equal(content["transposed"], CONTENT["weight"].t()) and torch.equal(content["view"], view)
    sizes = [path.stat().st_size for path in (tmp_path / "file.tensors").iterdir()]
    assert max(sizes) < 10_000 and len(sizes) == 5
    info = torch.load(tmp_path / "file.info.pt", weights_only=True)
    assert info[0] == {"dtype": torch.float32, "shape": torch.Size([2, 3]), "expert_model_parallel": False}


class Code:
    pass


def test_other_classes_are_refused(tmp_path):
    write_rank(tmp_path / "file.pt", CONTENT, xser=True)
    torch.save({"object": Code()}, tmp_path / "object.pt")
    with pytest.raises(ValueError, match=r"object.pt .* cannot be read"):
        read_tensors(tmp_path / "object.pt")
    with reference_classes():
        torch.save({"weight": Code()}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"file.pt .* cannot be read"):
        read_tensors(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "tensor_0.pt").unlink(), r"tensor_0.pt does not exist, .*file.pt refers to it"),
        (lambda folder: (folder / "tensor_0.pt").write_bytes(b"x"), r"tensor_0.pt \(1 bytes\) cannot be read"),
        (
            lambda folder: torch.save(torch.zeros(3, 2), folder / "tensor_0.pt"),
            r"tensor_0.pt has shape \(3, 2\), file.pt.info.pt says \(2, 3\)",
        ),
        (
            lambda folder: torch.save(torch.zeros(2, 3, dtype=torch.half), folder / "tensor_0.pt"),
            r"dtype torch.float16, file.pt.info.pt says torch.float32",
        ),
        (lambda folder: [shutil.rmtree(folder), folder.mkdir()], "avoid_saving_lower_precision_weights"),
    ],
)
def test_damaged_xser_files_are_refused(damage, message, tmp_path):
    write_rank(tmp_path / "file.pt", CONTENT, xser=True)
    damage(tmp_path / "file.pt.tensors")
    with pytest.raises(ValueError, match=message):
        read_tensors(tmp_path / "file.pt")


def test_references_to_files_elsewhere_are_refused(tmp_path):
    """The number of a reference becomes part of a file's name."""
    torch.save(torch.ones(1), tmp_path / "secret.pt")
    for tid in ("0/../../secret", -1, 0.5, None):
        (tmp_path / "file.pt.tensors" / "tensor_0").mkdir(parents=True, exist_ok=True)
        with reference_classes():
            torch.save({"weight": TensorReference(tid)}, tmp_path / "file.pt")
        with pytest.raises(ValueError, match=r"file.pt refers to the tensor .*, not to a number"):
            read_tensors(tmp_path / "file.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_every_damage_of_a_pickle_is_named(tmp_path):
    """One byte of the pickle is changed at a time: the file is read, or a ``ValueError`` names it."""
    file = tmp_path / "file.pt"
    torch.save({"a": torch.ones(4), "b": [1, "x", {"c": torch.zeros(3, dtype=torch.int64)}]}, file)
    content = file.read_bytes()
    start, choose, refused = content.index(b"data.pkl"), random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(content)
        damaged[start + choose.randrange(330)] = choose.randrange(256)
        file.write_bytes(damaged)
        try:
            read_tensors(file, mmap=False)
        except ValueError as error:
            refused += 1
            assert str(file) in str(error)
    assert refused > 25


def test_layouts_of_rank_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"use_zero1_dcp=True, whose metadata is a pickle"):
        find_rank_files(tmp_path, "optim")
    write_rank(tmp_path / "expert" / "dp_rank_00_ep_rank_00_tp_rank_00_pp_rank_00.pt", {})
    with pytest.raises(ValueError, match="expert-parallel rank"):
        find_rank_files(tmp_path / "expert")
    write_rank(tmp_path / "two" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", {})
    write_rank(tmp_path / "two" / "tp_rank_00_pp_rank_00" / "checkpoint.pt", {})
    with pytest.raises(ValueError, match="several layouts"):
        find_rank_files(tmp_path / "two")


def test_two_files_of_one_rank_are_refused(tmp_path):
    for name in ("dp_rank_00_tp_rank_00_pp_rank_00.pt", "dp_rank_0_tp_rank_0_pp_rank_0.pt"):
        torch.save({"weight": torch.ones(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"two files of dp_rank 0 .*dp_rank_00_tp.* and dp_rank_0_tp"):
        find_rank_files(tmp_path)


# parallel_layers.checkpointing


@pytest.mark.parametrize("xser", [False, True])
def test_save_and_load_have_neuronx_distributeds_layout(xser, tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    checkpointing.save({"model": model.state_dict(), "step": 4}, tmp_path, save_xser=xser)
    file = tmp_path / "tp_rank_00_pp_rank_00"
    stored = read_xser(file) if xser else torch.load(file / "checkpoint.pt", weights_only=True)
    assert torch.equal(stored["model"]["weight"], model.weight.detach())
    assert checkpointing.load(tmp_path, other, load_xser=xser)["step"] == 4
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(ValueError, match=f"saved with save_xser={xser}: pass load_xser={xser}"):
        checkpointing.load(tmp_path, other, load_xser=not xser)
    with pytest.raises(ValueError, match="other value of save_xser"):
        checkpointing.save({"model": model.state_dict()}, tmp_path, save_xser=not xser)
    checkpointing.save({"model": model.state_dict()}, tmp_path / "all", save_xser=xser, master_dp_only=False)
    assert (tmp_path / "all" / "tp_rank_00_pp_rank_00_dp_rank_00").exists()
    checkpointing.load(tmp_path / "all", other, load_xser=xser, master_dp_only=False)


def test_files_of_another_size_are_refused(tmp_path):
    for rank in range(2):
        write_rank(tmp_path / f"tp_rank_{rank:02d}_pp_rank_00" / "checkpoint.pt", {"model": {}})
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size 2, .* this run has tensor_model_parallel_size 1"):
        checkpointing.load(tmp_path, torch.nn.Linear(1, 1))
