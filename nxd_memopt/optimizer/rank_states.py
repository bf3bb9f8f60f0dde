"""Saves and loads the states of a sharded optimizer as one file per rank, in neuronx-distributed's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.optimizer.groups import require_no_experts
from nxd_memopt.optimizer.nxd_layout import to_nxd_layout
from nxd_memopt.optimizer.nxd_reading import OptimizerFiles, Target, read_state
from nxd_memopt.optimizer.sharded_parameters import Sharded
from nxd_memopt.parallel_layers import checkpointing, coordination, parallel_state
from nxd_memopt.parallel_layers.rank_files import find_rank_files
from nxd_memopt.parallel_layers.tensor_files import write_tensors


class StatesInRankFiles:
    """Methods of ``NeuronZero1Optimizer`` that write and read ``optim.dp_rank_XX.tp_rank_XX``
    files.
    """

    if TYPE_CHECKING:  # provided by the optimizer
        param_groups: list[dict[str, Any]]
        base_optimizer: Any
        sharding_group: ProcessGroup | None
        _sharded: list[Sharded]

        def _sharding(self) -> list[int]: ...
        def state_dict(self) -> dict[str, Any]: ...
        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def nxd_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` in NxD's layout, for NxD's own optimizer. Every rank calls.

        It has masters of all parameters, or of none if ``state_dict()`` has none.
        """
        state = self.state_dict()
        masters: dict[int, Tensor] = {}
        if state["sharded_master_weights"]:
            masters = {i: each.shard.detach() for i, each in enumerate(self._sharded)}
            masters |= state["sharded_master_weights"]
        trained = [param for group in self.param_groups for param in group["params"]]
        require_no_experts(trained, "NxD's layout", "use save_training_state")
        return to_nxd_layout(state, self.param_groups, masters, self.sharding_group)

    def save_sharded_state_dict(self, output_dir: str | Path, num_workers_per_step: int = 8) -> None:
        """Write ``output_dir/optim.dp_rank_XX.tp_rank_XX`` of every rank. Every rank calls.

        Args:
            output_dir: created if needed.
            num_workers_per_step: ranks of one host that copy their state to the host at the same
                time.

        Raises:
            ValueError: a pipeline has several stages, which the names of the files do not tell apart.
        """
        if parallel_state.get_pipeline_model_parallel_size() > 1:
            raise ValueError(f"{output_dir}: files of several stages would have one name: use save_checkpoint")
        # torch_xla may return wrong values when pending results are read one by one
        with backend.outside_step():
            state = self.nxd_state_dict()
        # Ranks of one host take turns: each turn copies a rank's full state to host memory.
        for is_my_turn in coordination.turns(num_workers_per_step):
            with coordination.raise_together(f"saving {output_dir}"):
                if is_my_turn:
                    write_tensors(_rank_file(output_dir), checkpointing.to_host(state))

    def load_sharded_state_dict(self, output_dir: str | Path, num_workers_per_step: int = 8) -> None:
        """Load files of ``save_sharded_state_dict``, for any T and D.

        The files may be of this library or of neuronx-distributed. Every rank calls, after loading
        the model.

        Raises:
            ValueError: on every rank, if files are missing, damaged, or do not fit.
        """
        self.load_rank_files(output_dir, num_workers_per_step)

    def load_rank_files(
        self, directory: str | Path, num_workers: int = 8, *, stages: Sequence[Sequence[Sequence[int | None]]] = ()
    ) -> None:
        """Load the rank files in ``directory``. Every rank calls, after loading the model.

        Args:
            directory: directory of the files.
            num_workers: ranks of one host that read at the same time.
            stages: see ``nxd_reading.Target``; needed if the files are of another number of pipeline stages.

        Raises:
            ValueError: on every rank, if files are missing, damaged, or do not fit.
        """
        trained = [param for group in self.param_groups for param in group["params"]]
        require_no_experts(trained, "a file per rank", "use load_training_state")
        state: dict[str, Any] = {}
        target = Target(self.param_groups, self.base_optimizer.param_groups, self._sharding(), stages)
        # Ranks of one host take turns, which bounds the host memory. A rank that fails makes all
        # ranks raise: the other ranks would wait for it in the all-gather below.
        for is_my_turn in coordination.turns(num_workers):
            with coordination.raise_together(f"loading {directory}"):
                if is_my_turn:
                    files = find_rank_files(directory, "optim")
                    if not stages:
                        stage = parallel_state.get_pipeline_model_parallel_rank()
                        files = files.of_stage(stage, parallel_state.get_pipeline_model_parallel_size())
                    state = read_state(OptimizerFiles(files), target)
        # Every rank calls together, after all turns: loading all-gathers the parameters.
        self.load_state_dict(state)


def _rank_file(output_dir: str | Path) -> Path:
    """Return the file of this rank."""
    data_rank = parallel_state.get_data_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    return Path(output_dir) / f"optim.dp_rank_{data_rank:02d}.tp_rank_{tensor_rank:02d}"
