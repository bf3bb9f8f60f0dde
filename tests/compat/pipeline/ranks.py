"""Checks of pipeline models on two ranks, each compared with one rank; ``test_pipeline.py`` starts it.

``torchrun --nproc_per_node=2 -m nxd_memopt.compat ranks.py [NAME ...]``
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import grads, parallel_state
from neuronx_distributed.pipeline import NxDPPModel
from neuronx_distributed.pipeline.comm import recv_python_object, send_python_object
from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule
from torch import nn

from tests.compat.pipeline.models import Block, DictModel, Model, accumulate, batch

INPUTS = ["ids", "mask", "labels"]
EXACT = {"rtol": 1e-12, "atol": 1e-14}  # fp64: sums in another order


def build(whole: nn.Module, **options) -> NxDPPModel:
    options = {"output_loss_value_spec": (True, False), "use_optimizer_wrapper": True, **options}
    return NxDPPModel(
        whole,
        transformer_layer_cls=Block,
        num_microbatches=options.pop("num_microbatches", 2),
        input_names=INPUTS,
        auto_partition=True,
        tracer_cls="torch",
        **options,
    )


def assert_local(model, reference: nn.Module, value) -> None:
    """Compare what ``value`` returns of each local parameter."""
    expected = dict(reference.named_parameters(remove_duplicate=False))
    names = [name for name, _ in model.local_named_parameters()]
    assert names, "a stage has parameters"
    for name, param in model.local_named_parameters():
        torch.testing.assert_close(
            value(param), value(expected[name]), **EXACT, msg=lambda text, n=name: f"{n}: {text}"
        )


def check_training_equals_one_rank() -> None:
    """Accumulation, tied weights, new lengths, interleaving, V * P below the number of layers."""
    for chunks, blocks in ((1, 3), (2, 5)):
        torch.manual_seed(3)
        whole = Model(blocks)
        reference = copy.deepcopy(whole)
        model = build(whole, virtual_pipeline_size=chunks, num_microbatches=4)
        optimizer = torch.optim.SGD(list(model.local_parameters()), lr=0.5)
        expected_optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
        for step in range(3):
            # Two batches of other lengths before one update: shared sums are applied once.
            for part in range(2):
                inputs = batch(10 * step + part, length=5 + part)
                state = torch.get_rng_state()
                loss = model.run_train(**inputs)
                assert torch.equal(torch.get_rng_state(), state), "no random numbers are drawn"
                expected = accumulate(reference, inputs)
                if model.is_last_stage():
                    torch.testing.assert_close(loss, expected, **EXACT)
                else:
                    assert loss is None
            assert_local(model, reference, lambda param: param.grad)
            norm = grads.get_grad_norm(list(model.local_parameters()))
            expected_norm = nn.utils.get_total_norm([param.grad for param in reference.parameters()])
            torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-6, atol=0)  # the norm is fp32
            optimizer.step()
            expected_optimizer.step()
            optimizer.zero_grad()
            expected_optimizer.zero_grad()
        inputs = batch(99)
        evaluated = model.run_eval(**inputs)
        if model.is_last_stage():
            expected = reference.eval()(**inputs)[0]
            torch.testing.assert_close(evaluated, expected.detach(), **EXACT)


def check_outputs() -> None:
    """Losses of micro-batches, averaged losses, outputs without a loss, dicts."""
    torch.manual_seed(3)
    whole = DictModel(4)
    reference = copy.deepcopy(whole)
    inputs = batch(5)
    spec = {"logits": False, "loss": True, "score": False}
    shared = build(whole, output_loss_value_spec=spec, broadcast_and_average_loss=True)
    loss = accumulate(reference, inputs)
    torch.testing.assert_close(shared.run_train(**inputs), loss.float())
    torch.testing.assert_close(shared.run_eval(**inputs), loss.float())
    each = build(copy.deepcopy(reference), output_loss_value_spec=spec, return_mb_loss=True).run_train(**inputs)
    assert (each is None) == (dist.get_rank() == 0)
    outputs = build(copy.deepcopy(reference), output_loss_value_spec=None)
    result = outputs.run_eval(**inputs)
    if each is not None:
        torch.testing.assert_close(torch.stack(each).mean(), loss, **EXACT)
        logits = torch.cat([part["logits"] if isinstance(part, dict) else part[0] for part in result])
        torch.testing.assert_close(logits, reference(**inputs)["logits"], **EXACT)
    try:
        outputs.run_train(**inputs)
    except RuntimeError as error:
        assert "training needs a loss" in str(error)
    else:
        raise AssertionError("training without a loss")


def check_names_and_states() -> None:
    """Names of the whole model, buffers that are not stored, whole and local state dicts; nothing of the caller's."""
    torch.manual_seed(3)
    whole = Model(12)
    reference = copy.deepcopy(whole)
    leaves = ["Block"]
    model = build(whole, leaf_module_cls=leaves, virtual_pipeline_size=2)
    # The last chunk's copy of a tied weight gets the values of the first stage when all chunks are on the device.
    if dist.get_rank() == 1:
        whole.head.weight.data.zero_()
    model.move_model_to_device()
    assert_local(model, reference, lambda param: param.detach())
    assert leaves == ["Block"], "the caller's list stays"
    names = [name for name, _ in model.local_named_parameters()]
    first = dist.get_rank() == 0
    assert ("embed.weight" in names) == first and ("head.weight" in names) != first
    buffers = [name for name, _ in model.local_named_buffers()]
    assert len(buffers) == 6 and all(name.endswith(".scale") for name in buffers)
    state = model.local_state_dict()
    assert set(state) == set(names)
    for prefixed in (model.local_state_dict(prefix="p."), dict(model.local_named_parameters(prefix="p"))):
        assert set(prefixed) == {f"p.{name}" for name in names}
    changed = {name: value + 1 for name, value in reference.state_dict().items()}
    assert not model.load_state_dict(changed).missing_keys
    for name, param in model.local_named_parameters():
        assert torch.equal(param, changed[name])
    assert model.load_state_dict({}, strict=False).missing_keys
    for call in (model.forward, model.train, model.eval, model.state_dict):
        try:
            call()
        except RuntimeError:
            continue
        raise AssertionError(f"{call.__name__} of a pipeline model")
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    assert model.get_current_stage(1) == 2 + dist.get_rank()


class Layer(nn.Linear):
    """A layer of a manual stage."""

    def forward(self, inputs):
        """Return a list, as neuronx-distributed's manual stages do."""
        (hidden,) = inputs
        return [nn.functional.dropout(super().forward(hidden), 0.5, self.training)]


def check_manual_stages() -> None:
    """Shared weights count once in norms, states have weights, and modes reach the layers."""
    torch.manual_seed(7)
    layers = [Layer(4, 4, bias=False, dtype=torch.float64) for _ in range(3)]
    layers[2].weight.data.copy_(layers[0].weight.data)
    reference = copy.deepcopy(layers)
    reference[2].weight = reference[0].weight
    PipelineStageModule.mark_weight_sharing([(layers[0], "weight"), (layers[2], "weight")], "ends")
    model = NxDPPModel(
        layers,
        num_microbatches=2,
        manual_pp_partition=True,
        manual_pp_loss_fn=nn.functional.cross_entropy,
        use_optimizer_wrapper=True,
    )
    rank = dist.get_rank()
    assert list(model.local_state_dict()) == [f"pipeline_stage_modules.{i}.Layer.weight" for i in range(1 + rank)]
    inputs = torch.randn(4, 4, dtype=torch.float64)
    labels = torch.randint(0, 4, (4,))
    losses = [model.run_eval(inputs=inputs, labels=labels) for _ in range(2)]
    assert losses[0] == losses[1], "no dropout in evaluation"
    for layer in (*layers, *reference):
        layer.forward = lambda inputs, layer=layer: [nn.functional.linear(inputs[0], layer.weight)]
    loss = model.run_train(inputs=inputs, labels=labels)
    hidden = [inputs]
    for layer in reference:
        hidden = layer(hidden)
    expected = nn.functional.cross_entropy(hidden[0], labels)
    expected.backward()
    if rank == 1:
        torch.testing.assert_close(loss, expected.detach(), **EXACT)
    norm = grads.get_grad_norm(list(model.local_parameters()))
    wanted = torch.stack([reference[0].weight.grad, reference[1].weight.grad]).norm()
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)  # the norm is fp32
    labels[0] = -100
    with pytest.raises(ValueError, match="micro_batch_weight_fn"):
        model.run_train(inputs=inputs, labels=labels)


def check_initial_weights_depend_on_no_stage() -> None:
    """Stages with other seeds have the weights of one rank: on meta, with functions of one and two arguments."""

    def init(module: nn.Module, device: torch.device) -> None:
        assert device == torch.device("cpu")
        for param in module.parameters(recurse=False):
            nn.init.normal_(param)

    def init_alone(module: nn.Module) -> None:
        init(module, torch.device("cpu"))

    for function in (init, init_alone, None):
        torch.manual_seed(11)
        reference = Model(4)
        if function is not None:
            torch.manual_seed(11)
            for module in reference.modules():
                init(module, torch.device("cpu"))
        torch.manual_seed(11 + 100 * dist.get_rank())
        stages = {"num_microbatches": 2, "input_names": INPUTS, "auto_partition": True, "tracer_cls": "torch"}
        stages |= {"transformer_layer_cls": Block, "output_loss_value_spec": (True, False), "virtual_pipeline_size": 2}
        before = dict(stages)
        config = nxd.neuronx_distributed_config(
            pipeline_parallel_size=2,
            pipeline_config=stages,
            model_init_config={"meta_device_init": function is not None, "param_init_fn": function},
            activation_checkpoint_config="full",
            optimizer_config={"max_grad_norm": 1.0},
        )
        model = nxd.initialize_parallel_model(config, Model)
        assert stages == before, "the caller's dict stays"
        assert_local(model.module, reference, lambda param: param.detach())
        inputs = batch(3)
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
        model.run_train(**inputs)
        optimizer.step()
        accumulate(reference, inputs)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)  # the norm is fp32
        assert [name for name, _ in model.named_parameters()] == list(model.state_dict())


def check_checkpoints() -> None:
    """Stages write and load files of their own, without and with ZeRO-1."""
    for zero_one in (False, True):
        resume(zero_one)


def resume(zero_one: bool) -> None:
    """Compare a run with its continuation from a checkpoint."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    torch.manual_seed(11)
    stages = {"num_microbatches": 2, "input_names": INPUTS, "auto_partition": True, "tracer_cls": "torch"}
    stages |= {"transformer_layer_cls": Block, "output_loss_value_spec": (True, False)}
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=2, pipeline_config=stages, optimizer_config={"zero_one_enabled": zero_one}
    )
    model = nxd.initialize_parallel_model(config, Model)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
    model.run_train(**batch(3))
    optimizer.step()
    optimizer.zero_grad()
    nxd.save_checkpoint(shared[0], "one", model=model, optimizer=optimizer)
    files = sorted(path.name for path in Path(shared[0]).glob("one/model/*.pt"))
    assert files == [f"dp_rank_00_tp_rank_00_pp_rank_0{rank}.pt" for rank in range(2)], files
    after = {name: value.clone() for name, value in model.state_dict().items()}
    again = nxd.initialize_parallel_model(config, Model)
    other = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, again.parameters(), lr=0.1)
    nxd.load_checkpoint(shared[0], "one", model=again, optimizer=other)
    for name, value in again.state_dict().items():
        assert torch.equal(value, after[name]), name
    for each in (model, again):
        each.run_train(**batch(4))
    optimizer.step()
    other.step()
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def check_checkpoints_of_other_sizes() -> None:
    """A checkpoint of one stage goes on with two, and one of two with one: tied and untied, with and without ZeRO-1."""
    for tied in (False, True):
        for zero_one in (False, True):
            for before, after in ((1, 2), (2, 1)):
                resume_at_other_size(before, after, tied=tied, zero_one=zero_one)


def resume_at_other_size(before: int, after: int, *, tied: bool, zero_one: bool) -> None:
    """Compare all states and the next step of runs with ``before`` and ``after`` stages."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    stages = {"num_microbatches": 2, "input_names": INPUTS, "auto_partition": True, "tracer_cls": "torch"}
    stages |= {"transformer_layer_cls": Block, "output_loss_value_spec": (True, False), "use_optimizer_wrapper": True}
    weights: list[dict[str, torch.Tensor]] = []
    for size, step in ((before, "write"), (before, "go on"), (after, "go on")):
        torch.manual_seed(11)
        parallel_state.destroy_model_parallel()
        config = nxd.neuronx_distributed_config(
            pipeline_parallel_size=size, pipeline_config=stages, optimizer_config={"zero_one_enabled": zero_one}
        )
        model = nxd.initialize_parallel_model(config, lambda: Model(tied=tied))
        # Matrices and biases, as in most scripts.
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for p in named.values() if p.dim() == dim], "weight_decay": 0.1 * dim} for dim in (2, 1)
        ]
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=0.1)
        if step == "write":
            run_step(model, optimizer, 3)
            nxd.save_checkpoint(shared[0], "one", model=model, optimizer=optimizer)
            continue
        nxd.load_checkpoint(shared[0], "one", model=model, optimizer=optimizer)
        run_step(model, optimizer, 4)
        gathered: list[dict[str, torch.Tensor]] = [{}, {}]
        dist.all_gather_object(gathered, {name: value.clone() for name, value in model.state_dict().items()})
        weights.append(gathered[0] | gathered[1])
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) == 10
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-6, atol=1e-6, msg=f"{name} {before} {tied}")


def run_step(model: nn.Module, optimizer: Any, seed: int) -> None:
    """Train the same batch on every data-parallel rank."""
    model.run_train(**batch(seed))  # pyright: ignore[reportCallIssue]
    optimizer.step()
    optimizer.zero_grad()


def check_unequal_labels() -> None:
    """The mean of means is refused, unless it is weighted; then it is the mean over the batch."""
    torch.manual_seed(3)
    whole = Model(4)
    reference = copy.deepcopy(whole)
    inputs = batch(8)
    inputs["labels"][0, 1:] = -100
    model = build(whole)
    try:
        model.run_train(**inputs)
    except ValueError as error:
        assert "micro_batch_weight_fn" in str(error)
    else:
        raise AssertionError("unequal numbers of labels")
    model = build(copy.deepcopy(reference), micro_batch_weight_fn=lambda batch: (batch["labels"] != -100).sum())
    loss = model.run_train(**inputs)
    expected = accumulate(reference, inputs)
    if model.is_last_stage():
        torch.testing.assert_close(loss, expected, **EXACT)
    assert_local(model, reference, lambda param: param.grad)


def check_autocast() -> None:
    """The autocast of the caller is on in forwards."""
    torch.manual_seed(3)
    whole = Model(2).float()
    reference = copy.deepcopy(whole)
    inputs = batch(2)
    inputs["mask"] = inputs["mask"].float()
    model = build(whole, use_optimizer_wrapper=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.run_train(**inputs)
        assert torch.is_autocast_enabled("cpu")
        expected = accumulate(reference, inputs)
    if model.is_last_stage():
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # fp32: two means of halves
        assert loss.item() != reference.float()(**inputs)[0].item(), "autocast was on"


def check_messages() -> None:
    """Plain objects travel as JSON over store and gloo; classes are refused; the timeline has both stages."""
    message = {"a": (1, None, [torch.Size([2]), torch.float16]), 3: torch.device("cpu")}
    for method in ("tcp", "gloo"):
        parallel_state.initialize_pp_gloo_groups()
        if dist.get_rank() == 0:
            send_python_object(message, method=method)
        else:
            assert recv_python_object(method=method) == message
    try:
        send_python_object({"x": Path()})
    except TypeError as error:
        assert "Path cannot be sent" in str(error)
    else:
        raise AssertionError("an object of a class")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    path = Path(shared[0]) / "trace.json"
    torch.manual_seed(3)
    build(Model(2), trace_file_path=str(path), _use_gloo_for_metadata_comm=True).run_train(**batch(1))
    if dist.get_rank() == 0:
        events = json.loads(path.read_text().rstrip(",\n") + "]")
        assert {event["pid"] for event in events} == {0, 1} and len(events) == 4


def main() -> None:
    """Run the named checks, or all."""
    dist.init_process_group("xla")
    wanted = sys.argv[1:]
    for name, check in list(globals().items()):
        if name.startswith("check_") and (not wanted or name.removeprefix("check_") in wanted):
            nxd.parallel_layers.initialize_model_parallel(pipeline_model_parallel_size=2)
            check()
            parallel_state.destroy_model_parallel()
            if dist.get_rank() == 0:
                print("passed", name, flush=True)


if __name__ == "__main__":
    main()
