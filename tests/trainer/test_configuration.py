"""The trainer's configuration and refusals, and the optimizers' arithmetic, on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_memopt import trainer
from nxd_memopt.trainer.activation_checkpoint import apply_activation_checkpointing, classes_to_recompute
from tests.reference import assert_says, error_message


def test_masters_follow_zero1():
    for zero_one in (False, True):
        config = trainer.neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero_one})
        assert set(config["mixed_precision_config"].values()) == {zero_one}


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"context_parallel_size": 2}, ("context_parallel_size 2", "use 1")),
        ({"lnc_size": 2}, ("lnc_size 2", "use 1")),
        ({"optimizer_config": {"zero_one_enable": True}}, ("zero_one_enable", "did you mean 'zero_one_enabled'")),
        ({"mixed_precision_config": {"use_master_weights_in_ckpt": True}}, ("use_master_weights=True",)),
        ({"model_init_config": {"meta_device_init": True}}, ("param_init_fn",)),
    ],
)
def test_what_is_not_offered_is_refused(options, facts):
    assert_says(error_message(lambda: trainer.neuronx_distributed_config(**options)), *facts)


def test_stages_need_the_alias():
    config = trainer.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config={"num_microbatches": 2})
    message = error_message(lambda: trainer.initialize_parallel_model(config, lambda: nn.Linear(1, 1)))
    assert_says(message, "pipeline_parallel_size 2", "initialize_parallel_model of nxd_memopt.compat")


def test_a_model_is_its_only_pipeline_stage():
    """NxD's examples train by ``run_train``, and recomputation takes ``local_modules``."""
    linear = nn.Linear(2, 1)
    model = trainer.NxDModel(linear, {})
    assert model.local_modules() == [linear] and model.original_module() is linear
    loss = trainer.NxDModel(nn.Sequential(linear, nn.Flatten(0)), {}).run_train(torch.ones(1, 2))
    assert loss.shape == (1,) and torch.equal(linear.weight.grad, torch.ones(1, 2))
    assert torch.equal(linear.bias.grad, torch.ones(1))


def test_a_single_stage_finds_the_loss_in_the_output_of_stages():
    """NxD's script of stages has ``return_dict=False`` for every number of stages."""

    class WithLoss(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.sum(), y

    model = WithLoss(2, 1)
    config = trainer.neuronx_distributed_config(pipeline_config={"output_loss_value_spec": (True, False)})
    loss = trainer.NxDModel(model, config).run_train(torch.ones(1, 2))
    assert loss.shape == () and torch.equal(model.weight.grad, torch.ones(1, 2))
    for unmarked in (None, {"num_microbatches": 2}):
        config = trainer.neuronx_distributed_config(pipeline_config=unmarked)
        with pytest.raises(RuntimeError, match=r"got tuple: change output_loss_value_spec"):
            trainer.NxDModel(model, config).run_train(torch.ones(1, 2))


def test_choices_of_recomputation_that_name_nothing_are_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    assert classes_to_recompute(model, nn.Linear) == (nn.Linear,)
    assert_says(error_message(lambda: classes_to_recompute(model, "full")), "Sequential", "_no_split_modules")
    assert_says(error_message(lambda: classes_to_recompute(model, "selective")), "'selective'", "'full'")
    assert_says(error_message(lambda: classes_to_recompute(model, [])), "[]")
    assert_says(error_message(lambda: classes_to_recompute(model, [nn.LayerNorm])), "LayerNorm")


def test_a_wrapper_that_returns_another_module_takes_its_place():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    apply_activation_checkpointing(model, nn.Sequential, lambda module: isinstance(module, nn.Linear))
    assert isinstance(model[0], nn.Sequential) and model[0][0] is shared
    assert model[1][1] is model[0] and isinstance(model[1][0], nn.ReLU)


def test_saves_that_are_not_offered_are_refused(tmp_path):
    for option in ("use_zero1_dcp", "avoid_saving_lower_precision_weights"):
        save = {option: True}
        assert_says(error_message(lambda save=save: trainer.save_checkpoint(tmp_path, "tag", {}, **save)), option)
    for tag in ("a/b", "../x", ".hidden", ""):
        assert_says(error_message(lambda tag=tag: trainer.save_checkpoint(tmp_path, tag, {})), "tag", repr(tag))
    assert_says(error_message(lambda: trainer.save_checkpoint(tmp_path, "t", {}, num_kept_ckpts=0)), "got 0")
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, model={}))
    assert_says(message, tmp_path, "no complete checkpoint")
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, use_zero1_dcp=True))
    assert_says(message, "use_zero1_dcp")
