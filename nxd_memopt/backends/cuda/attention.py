"""Selects among the fused attention kernels of an NVIDIA GPU, fastest first."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.planner.techniques.gpu_attention import implementations as implementations
from nxd_memopt.planner.techniques.gpu_attention import limit_refusal

_SWITCHES = {
    "flash4": ("flash", "NVTE_FLASH_ATTN"),
    "cudnn": ("cudnn", "NVTE_FUSED_ATTN"),
    "flash": ("flash", "NVTE_FLASH_ATTN"),
    "efficient": ("mem_efficient", None),
}
"""Name in ``torch.backends.cuda.enable_*_sdp``, and Transformer Engine's environment variable."""
_HAS_VARLEN = find_spec("torch.nn.attention.varlen") is not None
_PYTORCH_KERNELS = ("cudnn", "flash", "efficient")


def refusal(implementation: str, call: AttentionCall) -> str | None:
    """Return why the kernel cannot run ``call``, or None if nothing rules it out.

    Switches are checked first, then the limits of PyTorch's kernels; ``ops`` checks those of this
    library's implementations.
    """
    reason = _switched_off_by(implementation)
    if reason is not None or implementation not in _PYTORCH_KERNELS:
        return reason
    reason = limit_refusal(
        implementation,
        dtype=str(call.dtype).removeprefix("torch."),
        head_dim=call.head_dim,
        masked=call.masked,
        packed=call.packed,
        dropout_p=call.dropout_p,
    )
    if reason is None and call.packed and not _HAS_VARLEN:
        return f"torch {torch.__version__} has no flash attention for packed documents: 2.10 has"
    return reason


def _switched_off_by(implementation: str) -> str | None:
    torch_switch, variable = _SWITCHES.get(implementation, (None, None))
    if variable is not None and os.environ.get(variable) == "0":
        return f"{variable}=0 switches it off: unset it"
    # torch._C's own function instead of torch.backends.cuda's: dynamo can trace this call
    if torch_switch is None or getattr(torch._C, f"_get_{torch_switch}_sdp_enabled")():
        return None
    return f"torch.backends.cuda.enable_{torch_switch}_sdp(False) switched it off"
