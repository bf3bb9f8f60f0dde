"""Fused paths give way to hooks and replaced modules, with one warning; the loss stays the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.modules.mlp import GatedActivation
from nxd_memopt.modules.rms_norm import RMSNorm
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model

CONFIGS = {"llama": llama_config, "gpt_neox": gpt_neox_config}
REGISTRATIONS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


def build(family: str, **memory):
    torch.manual_seed(0)
    return parallel_model(CONFIGS[family](), **memory)


def loss_and_gradients(model):
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def assert_equal_results(found, expected):
    # Other kernels and another order of sums: fp32 rounding.
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def callable_modules(family: str) -> list[str]:
    """Return the names of all modules of one layer and of the parts outside the layers."""
    names = [name for name, module in build(family).named_modules() if not isinstance(module, nn.ModuleList)]
    return [name for name in names if name and ".layers.1" not in name]


@pytest.mark.filterwarnings("ignore:.*is off here")
@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in REGISTRATIONS), ("gpt_neox", REGISTRATIONS[0])]
)
def test_every_hook_is_called_and_changes_no_result(family, kind):
    expected = loss_and_gradients(build(family))
    for name in callable_modules(family):
        model, calls = build(family), []
        getattr(model.get_submodule(name), kind)(lambda *_, calls=calls: calls.append(1))
        assert_equal_results(loss_and_gradients(model), expected)
        assert calls == [1], f"{kind} on {name}"


@pytest.mark.filterwarnings("ignore:.*is off here")
@pytest.mark.parametrize("family", CONFIGS)
def test_global_hooks_see_every_module(family):
    model, seen = build(family), []
    expected = loss_and_gradients(model)
    handle = register_module_forward_hook(lambda module, *_: seen.append(module) or None)
    try:
        assert_equal_results(loss_and_gradients(model), expected)
    finally:
        handle.remove()
    missing = {type(m).__name__ for m in model.modules() if not isinstance(m, nn.ModuleList) and m not in seen}
    assert not missing


@pytest.mark.parametrize(
    ("family", "name", "path", "cost"),
    [
        ("llama", "self_attn.k_proj", "projection of q_proj, k_proj, v_proj", "each layer has its own all-gather"),
        ("llama", "input_layernorm", "residual + norm", "separate pass"),
        ("gpt_neox", "mlp.dense_4h_to_h", "attention and MLP in parallel", "two all-gathers and two reductions"),
    ],
)
def test_one_warning_names_the_module_and_the_cost(family, name, path, cost):
    model = build(family)
    with pytest.warns(UserWarning) as caught:
        for layer in model.decoder_layers():
            layer.get_submodule(name).register_forward_hook(lambda *_: None)
    (warning,) = caught
    text = str(warning.message)
    assert "layers.0" in text
    assert f"{name.split('.')[-1]} has a hook" in text
    assert path in text
    assert cost in text
    assert warning.filename == __file__  # the line that registers the hook


def test_a_hook_on_the_head_gets_the_logits():
    model, shapes = build("llama"), []
    with pytest.warns(UserWarning, match=r"lm_head has a hook, so the fused head with loss is off"):
        model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape[:2]) or None)
    assert_equal_results(loss_and_gradients(model), loss_and_gradients(build("llama")))
    assert shapes == [(2, 12)]


class Doubled(nn.Module):
    """Activation whose result shows that it was called."""

    def forward(self, gate, up):
        return 2 * gate * up


class ScaledNorm(RMSNorm):
    def forward(self, hidden):
        return 3 * super().forward(hidden)


@pytest.mark.filterwarnings("ignore:.*is off here")
@pytest.mark.parametrize("how", ["setattr", "set_submodule", "add_module", "forward", "class"])
def test_a_replaced_norm_is_called(how):
    model = build("llama")
    layer = model.decoder_layers()[0]
    size, original = model.config.hidden_size, layer.input_layernorm
    scaled = ScaledNorm(size, original.eps)
    before = loss_and_gradients(model)[0]
    match how:
        case "setattr":
            layer.input_layernorm = scaled
        case "set_submodule":
            layer.set_submodule("input_layernorm", scaled)
        case "add_module":
            layer.add_module("input_layernorm", scaled)
        case "forward":
            original.forward = lambda hidden: 3 * RMSNorm.forward(original, hidden)
        case _:
            original.__class__ = ScaledNorm
    after = loss_and_gradients(model)[0]
    # The same model with the factor in the weight.
    expected = build("llama")
    with torch.no_grad():
        expected.decoder_layers()[0].input_layernorm.weight.mul_(3)
    torch.testing.assert_close(after, loss_and_gradients(expected)[0])
    assert not torch.allclose(after, before, rtol=1e-4)


def test_a_replaced_submodule_of_a_bypassed_module_is_called():
    model, calls = build("gpt_neox"), []
    attention = model.decoder_layers()[1].attention

    class Counted(type(attention.dense)):
        def forward(self, input):
            calls.append(1)
            return super().forward(input)

    replacement = copy.deepcopy(attention.dense)
    replacement.__class__ = Counted
    assert "_fused_paths" not in vars(replacement)  # it would refer to a copy of the decoder layer
    with pytest.warns(UserWarning, match=r"layers\.1: attention\.dense is a Counted instead of a RowParallelLinear"):
        attention.dense = replacement
    assert_equal_results(loss_and_gradients(model), loss_and_gradients(build("gpt_neox")))
    assert calls == [1]


def test_removing_a_hook_turns_the_path_on_again():
    model = build("llama")
    norm = model.decoder_layers()[0].input_layernorm
    with pytest.warns(UserWarning, match="is off here"):
        handle = norm.register_forward_hook(lambda *_: None)
    path = model.decoder_layers()[0].fused_input_norm
    assert not path.is_active
    assert "residual + norm: on in 3 of 4 (input_layernorm has a hook)" in model.fusions.describe()
    handle.remove()
    assert path.is_active
    assert "residual + norm: on in 4 of 4" in model.fusions.describe()


@pytest.mark.filterwarnings("ignore:.*is off here")
def test_a_copy_has_its_own_paths():
    model = build("llama")
    copied, calls = copy.deepcopy(model), []
    copied.decoder_layers()[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1) or None)
    with pytest.warns(UserWarning, match="input_layernorm has a hook"):
        loss_and_gradients(copied)
    assert calls.pop() == 1
    assert not copied.decoder_layers()[0].fused_input_norm.is_active
    assert model.decoder_layers()[0].fused_input_norm.is_active
    loss_and_gradients(model)
    assert calls == []
    loss_and_gradients(copied)
    assert calls == [1]


@pytest.mark.parametrize("family", CONFIGS)
def test_memory_techniques_do_not_warn(family):
    model = build(family, recompute_granularity="selective", recompute_modules=("norm", "mlp_act"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = loss_and_gradients(build(family))
        assert_equal_results(loss_and_gradients(model), expected)
        apply_memory(model, MemoryConfig())
        assert_equal_results(loss_and_gradients(model), expected)
        apply_memory(model, MemoryConfig(recompute_granularity="full"))
        assert_equal_results(loss_and_gradients(model), expected)


def test_recomputed_norms_keep_the_branches_merged_unless_hooked():
    model, calls = build("gpt_neox", recompute_granularity="selective", recompute_modules=("norm",)), []
    layer = model.decoder_layers()[0]
    assert layer.merged_branches.is_active
    with pytest.warns(UserWarning, match="input_layernorm has a hook"):
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1) or None)
    assert not layer.merged_branches.is_active
    loss_and_gradients(model)
    assert calls


def test_a_recomputed_activation_keeps_the_gated_kernel_which_computes_it_again():
    layer = build("llama", recompute_granularity="selective", recompute_modules=("mlp_act",)).decoder_layers()[0]
    path = layer.mlp.fused
    assert path.unavailable is not None  # no GPU
    path.unavailable = None
    assert path.is_active
    with pytest.warns(UserWarning, match="act has a hook"):
        layer.mlp.act.register_forward_hook(lambda *_: None)
    assert not path.is_active


def test_a_recomputed_activation_with_another_forward_is_called():
    model = build("llama")
    layer, calls = model.decoder_layers()[0], []
    activation = layer.mlp.act.forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer.mlp.act.forward = lambda *tensors: calls.append(1) or activation(*tensors)
        apply_memory(model, MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp_act",)))
    layer.mlp.fused.unavailable = None
    assert not layer.mlp.fused.is_active
    loss_and_gradients(model)
    assert calls


def test_classes_of_the_paths_are_those_that_the_models_build():
    # A path whose expected class is wrong would be off for ever, without a word.
    for family in CONFIGS:
        for path in build(family).fusions.paths:
            assert path.reason_off is None or path.unavailable is not None, path.name
    kinds = {type(module) for family in CONFIGS for module in build(family).modules()}
    assert {RMSNorm, LayerNorm, GatedActivation} <= kinds


def test_a_hook_turns_off_a_path_that_overwrites_what_it_sees():
    """Backward of the gated MLP writes gradients into the outputs of gate and up, which a hook could keep."""
    mlp = parallel_model(llama_config()).model.layers[0].mlp
    mlp.fused.unavailable = None
    for projection in (mlp.gate_proj, mlp.up_proj):
        assert mlp.fused.is_active
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = projection.register_forward_hook(lambda *_: None)
            assert not mlp.fused.is_active
        handle.remove()
    assert mlp.fused.is_active
