"""Runs neuronx-distributed's own package on CPU ranks: its gloo mode, and stubs of what only Trainium has.

It needs torch_xla, whose device is replaced with the CPU after the import; collectives use gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nxd_stubs import install_stubs
from torch import Tensor

NOT_ON_ANY_INDEX = (
    "torch_neuronx",
    "neuronxcc",
    "libneuronxla",
    "nki",
    "nkilib",
    "neuronx_distributed_training",
)
NOT_NEEDED_HERE = ("boto3", "botocore", "tenacity")


def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``factory`` with the CPU for ``device="xla"``, for calls during recomputation too."""

    def create(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device")) == "xla":
            kwargs["device"] = torch.device("cpu")
        return factory(*args, **kwargs)

    return create


def import_neuronx_distributed(source: Path) -> None:
    """Make ``source/neuronx_distributed`` importable.

    The environment must have ``NXD_CPU_MODE=1`` and ``PJRT_DEVICE=CPU``.
    """
    # Imported before the stubs: torch_xla looks for libneuronxla and must not find a stub.
    import torch_xla.core.xla_model as xm

    install_stubs(*NOT_ON_ANY_INDEX, *NOT_NEEDED_HERE)
    import torch_neuronx.utils

    torch_neuronx.utils.get_platform_target = lambda: "trn1"
    # Annotations in neuronx-distributed name these classes of torch_neuronx's C++ extension.
    custom_classes = SimpleNamespace(SPMDModel=object, LayoutTransformation=object)
    torch.classes.neuron = custom_classes  # pyright: ignore[reportAttributeAccessIssue]
    xm.xla_device = lambda *_: torch.device("cpu")
    # The code was written for XLA's tensors, which have no strides that a view could conflict
    # with: on the CPU ``view`` of a transposed tensor is an error, ``reshape`` copies.
    torch.Tensor.view = torch.Tensor.reshape  # pyright: ignore[reportAttributeAccessIssue]
    sys.path.insert(0, str(source))
    torch.ones = on_cpu(torch.ones)  # the examples create their causal masks with it
