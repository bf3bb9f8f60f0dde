"""A script written for neuronx-distributed, which imports nothing of nxd_memopt.

    torchrun --nproc_per_node 2 -m nxd_memopt.compat docs/examples/nxd_script.py
    torchrun --nproc_per_node 2 docs/examples/nxd_script.py     # with neuronx-distributed installed, on Trainium

To move it for good, replace ``neuronx_distributed`` by ``nxd_memopt`` in the imports, and the names of torch_xla by
those of ``nxd_memopt.backends.backend`` (docs/migrating_from_nxd.md).
"""

import neuronx_distributed as nxd
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

TENSOR_PARALLEL = 2
HIDDEN, WIDTH = 64, 256


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, WIDTH, bias=False, gather_output=False)
        self.down = RowParallelLinear(WIDTH, HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def main():
    torch.distributed.init_process_group("xla")
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=TENSOR_PARALLEL,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, MLP)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1)).to(xm.xla_device())
    for step in range(1, 6):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            xm.master_print(f"step {step}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
