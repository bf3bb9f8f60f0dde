"""The command ``nxd-memopt certify``: arguments, the measuring process, the certificate."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nxd_memopt._optional import is_importable, require_transformers
from nxd_memopt.architectures.configs import (
    NAMED_CONFIGS,
    key_values,
    load_model_config,
    require_known_keys,
    require_sizes,
    with_defaults,
    with_experts,
)
from nxd_memopt.architectures.parameters import require_supported_values
from nxd_memopt.child_process import run_child
from nxd_memopt.config import MemoryConfig, ParallelConfig, from_mapping, require_one_of
from nxd_memopt.files import write_text
from nxd_memopt.planner.search.problem import require_memory, require_size

if TYPE_CHECKING:
    from nxd_memopt.certify.memory_terms import OptimizerState
    from nxd_memopt.certify.report.verdict import Certificate
    from nxd_memopt.certify.request import Answer, Request
    from nxd_memopt.moe_config import MoEConfig

EXPERT_MODELS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_neox_moe")
_WORKER = "nxd_memopt.certify.worker"


@dataclass(frozen=True)
class Certify:
    """Show, without the hardware, that a step recomputes, communicates and fits as it should.

    One step is forward, backward and the sequence-parallel gradient hook.
    Exit status 0: every check passed; 1: one failed; 2: wrong arguments.
    """

    model: str
    """``gpt-neox-20b``, ``llama-3-8b``, ``llama-2-7b``, a config.json, or a directory that has one."""
    backend: Literal["auto", "xla", "cpu", "cuda", "compiled"] = "auto"
    """xla: compile for a simulated NeuronCore; cpu, cuda: eager, no memory allocated; compiled: torch.compile;
    auto: xla if torch_xla is installed, else cpu."""
    tensor_model_parallel_size: int = 1
    sequence_parallel_enabled: bool = False
    expert_model_parallel_size: int = 1
    """Data-parallel ranks over which experts are divided."""
    reduce_dtype: Literal["float32"] | None = None
    """Reduce the linear layers' partial sums in fp32."""
    seq_length: int = 2048
    micro_batch_size: int = 1
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    recompute_granularity: Literal["selective", "full"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None
    recompute_keep_core_attn: bool = False
    attention_backend: str = "auto"
    isolate_documents: bool = False
    """Several documents in a row, which do not attend to each other."""
    moe: tuple[str, ...] = ()
    """Options of a model with experts, KEY=VALUE, such as moe_expert_block_size=128."""
    override: tuple[str, ...] = ()
    """Changes of the model's config, KEY=VALUE, such as num_hidden_layers=4."""
    measure_layers: tuple[int, int] = (2, 4)
    """Two depths that are measured; the line through them is drawn to the model's own."""
    max_temp_ratio: float | None = None
    """Fail if the step with recomputation keeps more than this fraction of the bytes that it keeps
    without recomputation.

    Default: any saving passes."""
    device: Literal["trn1", "trn1n", "trn1-2xlarge", "trn2", "trn2-lnc1", "trn3", "trn3-lnc1"] = "trn1"
    device_memory_gib: float | None = None
    """Memory of one device, instead of that of ``device``."""
    reserve_gib: float = 1.25
    """GiB of the device's memory that tensors cannot use."""
    master_weights: bool = False
    """fp32 copies of narrower parameters, and fp32 gradients."""
    zero1: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""
    data_parallel_size: int = 1
    json: Path | None = None
    """Write all figures there."""

    def __post_init__(self) -> None:
        if self.backend == "auto":
            # The dataclass is frozen: chosen once, so that everything else reads what is measured.
            object.__setattr__(self, "backend", "xla" if is_importable("torch_xla") else "cpu")

    def __call__(self) -> int:
        """Measure, judge and print the certificate; return the exit status."""
        from nxd_memopt.certify.report.render import show

        request = self.request()
        # Checked here too, so that a missing package is reported before minutes of measuring.
        require_transformers("nxd-memopt certify")
        certificate = self.certificate(request, run_worker(request))
        show(certificate, self._title(request))
        if self.json is not None:
            document = {"request": dataclasses.asdict(request), **certificate.to_json()}
            write_text(self.json, json.dumps(document, indent=1) + "\n")
        if certificate.passed:
            return 0
        return 1

    def request(self) -> Request:
        """Return what to measure.

        Raises:
            ValueError: arguments contradict each other or the model's configuration.
        """
        from nxd_memopt.certify.request import Request

        if self.backend == "compiled" and self.tensor_model_parallel_size > 1:
            raise ValueError(
                "backend compiled measures one process, got tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size}: leave it out, or use backend cpu"
            )
        if self.isolate_documents and self.backend not in ("xla", "compiled"):
            raise ValueError(
                f"isolate_documents with backend {self.backend}: eager kernels read the bounds of documents, and this "
                "measurement has no values: use backend xla or compiled"
            )
        few, many = self.measure_layers
        self._require_valid_options()
        given = key_values("--moe", self.moe, example="moe_expert_block_size=128")
        config = load_model_config(self.model, self.override)
        changed = key_values("--override", self.override, example="num_hidden_layers=4")
        require_known_keys("--override", changed, of_file=load_model_config(self.model, ()))
        if "num_moe_experts" in given or "moe_shared_expert_intermediate_size" in given:
            config = with_experts(with_defaults(config), given)
        model_types = {*(named["model_type"] for named in NAMED_CONFIGS.values()), *EXPERT_MODELS}
        require_one_of("model_type", config.get("model_type"), tuple(model_types))
        require_sizes(with_defaults(config))
        require_supported_values(with_defaults(config), "--override")
        depth = config["num_hidden_layers"]
        if depth < many:
            raise ValueError(f"measure_layers {few} {many} exceed the model's {depth} layers: pass lower ones")
        # XLA:CPU widens bf16 to fp32, which would double the measured bytes. fp16 has the same size
        # and stays fp16.
        dtype = self.dtype
        if self.backend == "xla" and dtype == "bfloat16":
            dtype = "float16"
        parallel = ParallelConfig(
            self.tensor_model_parallel_size,
            self.sequence_parallel_enabled,
            self.reduce_dtype,
            expert_model_parallel_size=self.expert_model_parallel_size,
        )
        memory = self._memory()
        moe = self._experts(config, given)
        if moe is not None and moe.moe_layer_recompute:
            # The same recomputation, named in the memory's options, which the formulas read.
            from nxd_memopt.modules.moe.causal_lm import moe_memory

            memory |= dataclasses.asdict(moe_memory(MemoryConfig(**memory), moe))
            moe = dataclasses.replace(moe, moe_layer_recompute=False)
        return Request(
            config=config,
            parallel=dataclasses.asdict(parallel),
            memory=memory,
            sequence_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            dtype=dtype,
            backend=self.backend,
            layer_counts=self.measure_layers,
            isolate_documents=self.isolate_documents,
            moe=None if moe is None else dataclasses.asdict(moe),
        )

    def _require_valid_options(self) -> None:
        """Raise ``ValueError`` for numbers without a meaning, unusable depths, or a missing directory."""
        require_size("--seq-length", self.seq_length, is_length=True)
        for option in (
            "micro_batch_size",
            "tensor_model_parallel_size",
            "expert_model_parallel_size",
            "data_parallel_size",
        ):
            require_size(f"--{option.replace('_', '-')}", getattr(self, option))
        require_memory("--device-memory-gib", self.device_memory_gib)
        if not 0 <= self.reserve_gib < math.inf:
            raise ValueError(f"--reserve-gib must be at least 0 and finite, got {self.reserve_gib}")
        # A line through two depths gives the bytes per layer. One layer is not representative: its
        # peak may be in the embedding or in the loss.
        few, many = self.measure_layers
        if not 2 <= few < many:
            raise ValueError(f"measure_layers {few} {many} must be two depths, at least 2, the second one greater")
        # Every measured model has the layers that are recomputed together or alone (block).
        number = self.recompute_num_layers
        if number is not None and number > few:
            raise ValueError(
                f"recompute_num_layers {number} exceeds the measured {few} layers: pass --measure-layers {number} "
                f"{2 * number}, or {number} {number + 1} with recompute_method 'block'"
            )
        if self.max_temp_ratio is not None:
            if not 0 <= self.max_temp_ratio < math.inf:
                raise ValueError(f"--max-temp-ratio must be at least 0 and finite, got {self.max_temp_ratio}")
            if self.recompute_granularity is None:
                raise ValueError(
                    f"--max-temp-ratio {self.max_temp_ratio} needs recomputation: pass --recompute-granularity, or "
                    "leave it out"
                )
        self._optimizer()  # has checks of its own
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ValueError(f"--json {self.json}: {self.json.absolute().parent} is no directory: create it")
        if self.json is not None and self.json.is_dir():
            raise ValueError(f"--json {self.json} is a directory: name a file")

    def _experts(self, config: dict[str, Any], given: dict[str, Any]) -> MoEConfig | None:
        """Return the options of a model with experts, None for a dense model.

        Raises:
            ValueError: the options contradict the config, or certify measures no such model.
        """
        if config["model_type"] not in EXPERT_MODELS:
            if self.expert_model_parallel_size > 1:
                raise ValueError(
                    f"expert_model_parallel_size {self.expert_model_parallel_size} needs a model with experts, and "
                    f"model_type is {config['model_type']}: leave it out"
                )
            if given:
                raise ValueError(
                    f"--moe {self.moe[0]} needs a model with experts, and model_type is {config['model_type']}: "
                    "leave it out"
                )
            return None
        # Imports torch, which certificates of dense models do without in this process.
        from nxd_memopt.training.config.moe import MoEOptions, resolve_options

        require_transformers("nxd-memopt certify")
        from nxd_memopt.modules.moe.gpt_neox_config import config_of

        hf_config = config_of(config)
        moe = resolve_options(from_mapping(MoEOptions, given, section="--moe"), hf_config)
        assert moe is not None
        if not moe.moe_pad_expert_input_to_capacity and moe.moe_expert_block_size is None:
            raise ValueError(
                "certify measures shapes without values, and the rows of an expert depend on the routing: pass --moe "
                "moe_expert_block_size=128, or moe_expert_capacity_factor=1.25 moe_pad_expert_input_to_capacity=true"
            )
        if moe.moe_layer_freq != 1:
            raise ValueError(
                f"moe_layer_freq {moe.moe_layer_freq} mixes dense layers and layers with experts, which need "
                "different memory: certify measures models whose layers all have experts"
            )
        return moe

    def _memory(self) -> dict[str, Any]:
        """Return the command's options that are fields of ``MemoryConfig``."""
        # MemoryConfig may have fields without an option of the command; they keep their defaults.
        names = [field.name for field in dataclasses.fields(MemoryConfig)]
        memory: dict[str, Any] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        MemoryConfig(**memory)  # constructed for its checks, before a process is started
        return memory

    def certificate(self, request: Request, answer: Answer) -> Certificate:
        """Return the checks of the measurements for the chosen device and optimizer."""
        from nxd_memopt.certify.report.judge import Device, judge
        from nxd_memopt.planner.hardware import DEVICE_GIB

        # stands_for is the user's dtype: backend xla measures fp16 instead of bf16 (see request).
        capacity_gib = self.device_memory_gib
        if capacity_gib is None:
            capacity_gib = DEVICE_GIB[self.device]
        return judge(
            request,
            answer,
            device=Device(capacity_gib, self.reserve_gib),
            optimizer=self._optimizer(),
            max_temp_ratio=self.max_temp_ratio,
            stands_for=self.dtype,
            compiler_flags=os.environ.get("NEURON_CC_FLAGS"),
        )

    def _optimizer(self) -> OptimizerState:
        """Return the memory of the chosen optimizer."""
        from nxd_memopt.certify.memory_terms import OptimizerState

        return OptimizerState(self.master_weights, self.zero1, self.data_parallel_size, self.expert_model_parallel_size)

    def _title(self, request: Request) -> str:
        """Return one line that names the model and the configuration."""
        parallel = request.parallel_config()
        sequence = ""
        if parallel.sequence_parallel_enabled:
            sequence = " with sequence parallelism"
        experts = ""
        if parallel.expert_model_parallel_size > 1:
            experts = f", EP={parallel.expert_model_parallel_size}"
        return (
            f"{self.model}: {request.config['num_hidden_layers']} layers, "
            f"T={parallel.tensor_model_parallel_size}{sequence}{experts}, "
            f"S={self.seq_length}, B={self.micro_batch_size}, {self.dtype}, "
            f"recompute {self.recompute_granularity}, "
            f"backend {self.backend}"
        )


def run_worker(request: Request) -> Answer:
    """Run the measurement in a new process, with another backend and other XLA flags than this one.

    Raises:
        ValueError: the measurement failed; the message has the process's last line of output.
    """
    from nxd_memopt.certify.request import Answer

    with tempfile.TemporaryDirectory(prefix="nxd-memopt-certify-") as directory:
        # Both are files and not pipes: the libraries in the worker may print to its stdout.
        question = Path(directory, "request.json")
        answer = Path(directory, "answer.json")
        question.write_text(json.dumps(dataclasses.asdict(request)), encoding="utf-8")
        environment = _worker_environment(request, Path(directory, "dump"))
        command = [sys.executable, "-m", _WORKER, str(question), str(answer)]
        done = run_child(command, environment, capture_output=True)
        # An exit status of 0 without an answer is a failure too. The last line of a traceback is
        # the exception with its message.
        if done.returncode != 0 or not answer.is_file():
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
            message = lines[-1] if lines else "no message"
            raise ValueError(f"measuring on backend {request.backend} failed: {message}")
        return Answer.from_json(json.loads(answer.read_text(encoding="utf-8")))


def _worker_environment(request: Request, dump: Path) -> dict[str, str]:
    """Return the environment of the measuring process, whose compiler dumps go to ``dump``."""
    # The worker is a single process even inside a torchrun job: it simulates its ranks.
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    # torch.compile is not a backend of its own: it compiles the CPU backend's operations.
    environment["NXD_MEMOPT_BACKEND"] = request.backend
    if request.backend == "compiled":
        environment["NXD_MEMOPT_BACKEND"] = "cpu"
    if request.backend == "xla":
        from nxd_memopt.backends.neuron.xla_inspect import dump_flags

        # neuronx-cc's flags have their own check in the certificate. In the simulation wrong flags
        # must not raise, so the check at run time is reduced to a warning.
        environment |= {
            "PJRT_DEVICE": "CPU",
            "XLA_FLAGS": dump_flags(dump),
            "NXD_MEMOPT_RECOMPUTE_CHECK": "warn",
        }
    return environment
