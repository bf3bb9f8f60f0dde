"""Two-dimensional convolutions sharded over their output or their input channels.

Shapes are ``[N, C, H, W]`` on T ranks; names and arguments follow neuronx-distributed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.parallel_layers import mappings, parallel_state
from nxd_memopt.parallel_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_weight_init,
    initialize_sharded_,
)
from nxd_memopt.parallel_layers.utils import ShardedModule, partition_size, set_tensor_model_parallel_attributes

IntPair = int | tuple[int, int]


class BaseParallelConv(ShardedModule):
    """Base of the convolutions: a weight ``[C_out, C_in, kH, kW]`` sharded along one dimension.

    Args:
        in_channels: channels of the full input.
        out_channels: channels of the full output.
        kernel_size, stride, padding, dilation: as in ``torch.nn.Conv2d``.
        groups: must be 1.
        bias: add a bias.
        padding_mode: must be ``"zeros"``.
        dtype: dtype of the parameters.
        device: device of the parameters.
        init_method: initializes the full weight in place; default that of ``torch.nn.Conv2d``.
        keep_master_weight: keep the full initial parameters as ``master_weight`` and
            ``master_bias``.
        partition_pad: allow a number of channels that T does not divide; zero channels are added.

    Raises:
        ValueError: other ``groups`` or ``padding_mode``, or T does not divide the channels and
            ``partition_pad`` is False.
    """

    partition_dim: int
    master_bias: Tensor | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntPair,
        stride: IntPair = 1,
        padding: IntPair = 0,
        dilation: IntPair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
    ) -> None:
        super().__init__()
        if groups != 1 or padding_mode != "zeros":
            raise ValueError(
                f"parallel convolutions need groups=1 and padding_mode='zeros', got {groups}, {padding_mode!r}"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.init_method = init_method
        self.keep_master_weight = keep_master_weight
        if isinstance(kernel_size, int):
            kernel_size = (kernel_size, kernel_size)
        # The local shape is the full one with C_out or C_in divided by T, after padding the
        # channels to a multiple of T. ``full`` stays unpadded: checkpoints store tensors of that
        # shape.
        size = parallel_state.get_tensor_model_parallel_size()
        dim = self.partition_dim
        full = (out_channels, in_channels, *kernel_size)
        what = ("out_channels", "in_channels")[dim]
        self.channels_per_partition = partition_size(
            what, full[dim], size, pad=partition_pad, pad_option="partition_pad=True"
        )
        local = list(full)
        local[dim] = self.channels_per_partition
        self.weight = nn.Parameter(torch.empty(local, dtype=dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, dim, full_shape=full)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(local[0], dtype=dtype, device=device))
            # One bias element per output channel: sharded with the output channels (dim 0), and
            # replicated (dim -1) if the input channels are sharded.
            set_tensor_model_parallel_attributes(self.bias, dim == 0, -dim, full_shape=full[:1])
        self.initialize_weight_biases()

    def initialize_weight_biases(self) -> None:
        """Initialize on the CPU; all tensor-parallel ranks call it in the same order of layers."""
        init_method = self.init_method or default_weight_init
        keep_full = self.keep_master_weight
        self.master_weight = initialize_sharded_(self.weight, init_method, keep_full=keep_full)
        if self.bias is not None:
            # Fan-in of the full layer, C_in * kH * kW, also if this rank has C_in/T channels.
            bias_init = default_bias_init(self.in_channels * self.weight[0, 0].numel())
            self.master_bias = initialize_sharded_(self.bias, bias_init, keep_full=keep_full)

    def _convolve(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(input, self.weight, bias, self.stride, self.padding, self.dilation)


class OutputChannelParallelConv2d(BaseParallelConv):
    """Convolution with each rank computing its output channels from the full input.

    Communication in forward / backward: none / all-reduce of dX. The output is
    ``[N, C_out/T, H, W]``, with C_out rounded up to a multiple of T
            under ``partition_pad``, or has all channels with ``gather_output``. The remaining arguments are
    the same as in ``BaseParallelConv``.
    """

    partition_dim = 0

    def __init__(self, *args: object, gather_output: bool = True, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        self.gather_output = gather_output

    def forward(self, input: Tensor) -> Tensor:
        # Every rank reads the same full input, so dX is the sum of the ranks' parts: the mapping
        # is the identity here, and an all-reduce in backward.
        output = self._convolve(mappings.copy_to_tensor_model_parallel_region(input), self.bias)
        if not self.gather_output:
            return output
        # Padded channels are last: cut them off.
        return mappings.gather_from_tensor_model_parallel_region_with_dim(output, 1)[:, : self.out_channels]


class InputChannelParallelConv2d(BaseParallelConv):
    """Convolution with each rank convolving its input channels; the results are summed.

    Communication in forward / backward: all-reduce / none with ``input_is_parallel``, else an
    all-gather of dX. The bias is added once, after the sum.
    The input is ``[N, C_in/T, H, W]`` with ``input_is_parallel``, else the full input, which is
    split here. The remaining arguments are the same as in ``BaseParallelConv``.
    """

    partition_dim = 1

    def __init__(self, *args: object, input_is_parallel: bool = False, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        self.input_is_parallel = input_is_parallel

    def forward(self, input: Tensor) -> Tensor:
        if not self.input_is_parallel:
            size = parallel_state.get_tensor_model_parallel_size()
            if input.size(1) != self.in_channels:
                raise ValueError(
                    f"the input has {input.size(1)} channels, the layer's in_channels is {self.in_channels}"
                )
            # With partition_pad zeros fill the channels up to a multiple of T.
            missing = self.channels_per_partition * size - input.size(1)
            if missing:
                input = F.pad(input, (0, 0, 0, 0, 0, missing))
            input = mappings.scatter_input_channels_to_tensor_model_parallel_region(input)
        output = mappings.functional_reduce_from_tensor_model_parallel_region(self._convolve(input, None))
        # The bias is replicated: added before the reduction it would count T times.
        if self.bias is None:
            return output
        return output + self.bias[:, None, None]
