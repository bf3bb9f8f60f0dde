"""The low-rank adapters (LoRA) that a run adds to its decoder layers: which layers have one, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_memopt.architectures.layers import fused_name
from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.lora_config import LoraConfig, default_targets, is_target

QKV = ("q_proj", "k_proj", "v_proj", "query_key_value")
_COLUMNS = ("column", "query_column", "kv_column")
_ROWS = ("row", "query_row")


@dataclass(frozen=True)
class Adapters:
    """The adapters of every decoder layer.

    Args:
        rank: r.
        layers: last parts of the names of the layers with an adapter; of a fused layer the names of its parts.
        has_dropout: the adapters' inputs are dropped.
    """

    rank: int
    layers: frozenset[str]
    has_dropout: bool

    def on(self, *names: str) -> bool:
        """Return whether one of the layers ``names`` has an adapter."""
        return any(name in self.layers for name in names)


def adapters_of(spec: ModelSpec, lora: LoraConfig) -> Adapters:
    """Return the adapters that ``modules.lora.add_adapters`` adds.

    Raises:
        ValueError: the model has experts, a name is of no linear layer of the decoder layers, or only
            some of the decoder layers have adapters.
    """
    if spec.has_experts:
        raise ValueError(
            f"lora_rank {lora.lora_rank} in a model with experts is not planned: leave the section lora out"
        )
    targets = lora.target_modules or default_targets(spec.model_type)
    # Adapters are added to linear layers of the decoder alone: embedding and head have other shardings.
    linear = [layer.name for layer in spec.layers if layer.sharding in (*_COLUMNS, *_ROWS)]
    depth = spec.num_layers
    # Hugging Face's and PEFT's name of each layer, by which it is found.
    fused = {name: fused_name(spec.model_type, name) for name in linear}
    by_layer = [frozenset(name for name in linear if is_target(fused[name].format(i), targets)) for i in range(depth)]
    for target in targets:
        if not any(is_target(name.format(i), [target]) for name in fused.values() for i in range(depth)):
            known = sorted({name.rpartition(".")[2] for name in fused.values()})
            raise ValueError(
                f"target_modules names {target!r}, which is no linear layer of the decoder layers: choose of {known}"
            )
    if len(set(by_layer)) > 1:
        raise ValueError(
            f"target_modules {list(targets)} names layers of some decoder layers only, which is not planned: use names "
            "without numbers, such as q_proj"
        )
    layers = frozenset(name.rpartition(".")[2] for name in by_layer[0])
    return Adapters(lora.lora_rank, layers, has_dropout=lora.lora_dropout > 0)


def adapter_shapes(spec: ModelSpec, adapters: Adapters, tensor_model_parallel_size: int) -> list[tuple[int, ...]]:
    """Return the shapes of A and B of each adapter of one decoder layer on one rank, in the model's order.

    Of a column-parallel layer A is replicated and B has the rank's rows; of a row-parallel one A has the
    rank's columns and B is replicated. The parts of a fused layer have one A.
    """
    seen: set[str] = set()
    replicas = spec.kv_replicas(tensor_model_parallel_size)
    shapes: list[tuple[int, ...]] = []
    for parameter in parameters(spec.with_layers(1)):
        parts = parameter.name.split(".")
        if ".layers.0." not in parameter.name or parts[-1] != "weight" or parts[-2] not in adapters.layers:
            continue
        # y = W x + (alpha / r) B A x: A is [r, in] and B is [out, r], on the rank's part of W.
        outputs, inputs = parameter.local_shape(tensor_model_parallel_size, replicas)
        fused = fused_name(spec.model_type, parts[-2])
        if fused not in seen:
            shapes.append((adapters.rank, inputs))
        seen.add(fused)
        shapes.append((outputs, adapters.rank))
    return shapes
