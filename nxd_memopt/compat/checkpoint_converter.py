"""neuronx-distributed's ``CheckpointConverterBase``: a full state dict to and from the files of all ranks.

It is for scripts written for neuronx-distributed
(``examples/training/*/convert_checkpoints.py``). ``nxd-memopt convert`` converts Hugging Face
directories, with checks of names and shapes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.checkpoint.nxd.parts import Kind, KVOrder, Layout
from nxd_memopt.compat.converter_arguments import CONVERSIONS, build_parser, require_supported
from nxd_memopt.compat.converter_files import find_input, load_full, output_file, read_partial, write_partial
from nxd_memopt.compat.converter_tensors import (
    cut_slice,
    fuse_gate_up,
    order_slices,
    pad_to_multiple,
    split_heads,
    unfuse_qkv,
)
from nxd_memopt.parallel_layers.tensor_files import write_tensors

State = dict[str, Tensor]
_SHARDED = ("embed_tokens", "lm_head", "wte", "gate_proj", "up_proj", "down_proj")


class CheckpointConverterBase:
    """Converter for LLaMA's layer names; subclasses adapt names, dimensions and experts.

    Class attributes:
        attribute_map: LLaMA's config key -> the model's key, with dots for nested keys.
        *_partition_dim: sharded dimension of these layers' weights.
        layer_name, layer_name_pattern: part of a decoder layer's parameter names; its full name.
    """

    attribute_map: dict[str, str] = {}  # noqa: RUF012 (as in neuronx-distributed, replaced and not changed)
    embedding_partition_dim = 0
    qkv_partition_dim = 0
    gate_up_proj_partition_dim = 0
    down_proj_partition_dim = 1
    o_proj_partition_dim = 1
    layer_name = "layers"
    layer_name_pattern = r"^(model\.layers\.\d+)"

    # What subclasses override

    def pre_process_full_state_before_tp_conversion(self, full_state: State, args: Any) -> State:
        """Return ``full_state`` with the names and shapes that neuronx-distributed's model has."""
        del args
        return full_state

    def post_process_full_state_after_tp_conversion(self, full_state: State, args: Any) -> State:
        """Return ``full_state`` with the original names and shapes."""
        del args
        return full_state

    def get_arg_parser(self) -> argparse.ArgumentParser:
        """Return the parser of the command line, to which subclasses add arguments."""
        return build_parser()

    # Names and dimensions

    def _get_config_value(self, config: dict[str, Any], key: str) -> Any:
        """Return ``config[key]``, or that of ``attribute_map[key]``; ``KeyError`` if absent."""
        if key in config:
            return config[key]
        # Configs such as DBRX's nest the keys: "ffn_config.ffn_hidden_size" is two look-ups.
        value: Any = config
        for name in self.attribute_map.get(key, key).split("."):
            if not isinstance(value, dict) or name not in value:
                raise KeyError(f"the config has no {key}, nor what attribute_map says for it")
            value = value[name]
        return value

    def is_qkv_weight(self, name: str) -> bool:
        return any(part in name for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"))

    def get_fused_qkv_key(self) -> str:
        return "qkv_proj.weight_qkv"

    def get_partition_dim(self, name: str) -> int:
        """Return the sharded dimension of ``name``; ``ValueError`` if it is not sharded."""
        if any(part in name for part in ("embed_tokens", "lm_head", "wte")):
            return self.embedding_partition_dim
        if self.is_qkv_weight(name):
            return self.qkv_partition_dim
        if any(part in name for part in ("gate_proj", "up_proj")):
            return self.gate_up_proj_partition_dim
        if "down_proj" in name:
            return self.down_proj_partition_dim
        if "o_proj" in name:
            return self.o_proj_partition_dim
        raise ValueError(f"{name} is not sharded: only embeddings, projections and the output head are")

    def get_hf_to_nxd_model_keys(
        self, qkv_linear: bool = True, is_gqa: bool = True
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the map of Q, K and V's last two name parts from Hugging Face to NxD, and back."""
        # With qkv_linear NxD has GQAQKVColumnParallelLinear's three parameters. Without it, a
        # model with grouped KV heads has three layers, and one without has a single qkv_proj.
        hf_keys = [f"{letter}_proj.weight" for letter in "qkv"]
        if qkv_linear:
            nxd_keys = [f"qkv_proj.weight_{letter}" for letter in "qkv"]
        elif is_gqa:
            nxd_keys = hf_keys
        else:
            nxd_keys = ["qkv_proj.weight"] * 3
        # Three names map to one in the last case, so the inverse has the last of them only,
        # v_proj.
        hf_to_nxd = dict(zip(hf_keys, nxd_keys, strict=True))
        nxd_to_hf = dict(zip(nxd_keys, hf_keys, strict=True))
        return hf_to_nxd, nxd_to_hf

    def get_weight_key(
        self, keys_hf_to_nxd: dict[str, str], keys_nxd_to_hf: dict[str, str], name: str, hf_to_nxd: bool
    ) -> str:
        if not self.is_qkv_weight(name):
            return name
        keys = keys_nxd_to_hf
        if hf_to_nxd:
            keys = keys_hf_to_nxd
        # "model.layers.0.self_attn.q_proj.weight": the keys are the last two parts of the name.
        prefix, _, last = name.rpartition(".")
        prefix, _, module = prefix.rpartition(".")
        return f"{prefix}.{keys[f'{module}.{last}']}"

    # Full state dict to shards

    def coalesce_qkv(self, state_dict: State, config: dict[str, Any], tp_degree: int) -> State:
        """Replace q_proj, k_proj and v_proj with qkv_proj, whose shard r is rank r's [q, k, v]."""
        # Rows in the order [q_0, k_0, v_0, q_1, ...] for ranks 0, 1, ...: a plain slice of the
        # result is what the fused layer expects on a rank.
        # Names are collected first, because the loop removes entries.
        dim = self.qkv_partition_dim
        for name in [name for name in state_dict if name.endswith("q_proj.weight")]:
            weights = [state_dict.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
            chunks = []
            for rank in range(tp_degree):
                chunks += [cut_slice(weight, dim, rank, tp_degree, name) for weight in weights]
            state_dict[name.replace("q_proj", "qkv_proj")] = torch.cat(chunks, dim)
        return state_dict

    def convert_full_state_to_tp(
        self,
        full_state: State,
        args: Any,
        tp_rank: int,
        pp_rank: int,
        ep_rank: int,
        partitions: list[str],
        config: dict[str, Any],
    ) -> State:
        """Return the state dict of one rank.

        Args:
            full_state: NxD's shapes, Hugging Face's names of query, key, value, gate and up.
            args: command-line options.
            tp_rank, pp_rank, ep_rank: tensor, pipeline and expert rank.
            partitions: name of the last layer of each stage except the last stage.
            config: content of config.json.
        """
        heads = self._heads(config)
        layout = self._layout(args, heads)
        keys, inverse = self.get_hf_to_nxd_model_keys(args.qkv_linear, heads[0] != heads[1])
        partial: State = {}
        for name, full in full_state.items():
            is_expert = "expert_mlps" in name
            if self._stage(name, args, partitions) not in (None, pp_rank):
                continue
            # Expert rank 0 has the parameters that are no experts; other expert ranks have
            # experts only. Experts are split over expert ranks along dimension 0, then over T.
            if ep_rank and not is_expert:
                continue
            if is_expert:
                full = cut_slice(full, 0, ep_rank, args.ep_size, name)
            kind = self._kind(name)
            if kind == "replicated":
                partial[name] = full
                continue
            target = name
            if args.qkv_linear:
                target = self.get_weight_key(keys, inverse, name, True)
            index, count = layout.slice_index(kind, tp_rank)
            shard = cut_slice(full, self.get_partition_dim(name), index, count, name)
            partial[target] = self._pad(name, shard, args, config)
        # Fused after sharding: a rank's gate_up_proj is [its rows of gate, its rows of up], which
        # is not a slice of the concatenated full weights.
        partial = fuse_gate_up(partial, self.get_partition_dim)
        if args.fuse_qkv and args.qkv_linear:
            partial = self.convert_partial_state_to_fused_qkv(partial, inverse, args.n_layers)
        return partial

    def _heads(self, config: dict[str, Any]) -> tuple[int, int]:
        """Return the numbers of query heads and of KV heads."""
        query = self._get_config_value(config, "num_attention_heads")
        # Models without grouped heads, such as LLaMA 1, have no entry.
        if "num_key_value_heads" not in {*config, *self.attribute_map}:
            return query, query
        return query, self._get_config_value(config, "num_key_value_heads") or query

    def _kind(self, name: str) -> Kind:
        """Return how the ranks share a parameter."""
        # Ranks with replicas of a KV head have the same slice of k and v. Queries and the output projection's
        # columns are in the order in which the query heads of a KV head are divided over its ranks; a joined
        # qkv_proj has neither replicas nor an order. Other sharded weights have plain rank order.
        if "k_proj" in name or "v_proj" in name:
            return "kv"
        if self.is_qkv_weight(name) or "o_proj" in name:
            return "query"
        if any(part in name for part in _SHARDED):
            return "column"
        return "replicated"

    def _layout(self, args: Any, heads: tuple[int, int]) -> Layout:
        """Return the order of heads over ranks."""
        kv_heads = heads[1]
        replicas = args.kv_size_multiplier if args.qkv_linear else 1
        # A slice of a part of a head would have the right shape for the ranks, and no model.
        for count, kind in zip(heads, ("query", "KV"), strict=True):
            if count % args.tp_size and (kind == "query" or replicas == 1):
                raise ValueError(
                    f"the number of {kind} heads {count} is not divisible by {args.tp_size} ranks: use another "
                    "--tp_size, or for KV heads --qkv_linear with --kv_size_multiplier"
                )
        if not args.qkv_linear:
            return Layout(args.tp_size)
        # With replicas each rank has exactly one KV head, so KV heads times replicas must be T.
        if replicas > 1 and kv_heads * replicas != args.tp_size:
            raise ValueError(
                f"kv_size_multiplier {replicas} times {kv_heads} KV heads is not tp_size "
                f"{args.tp_size}: use kv_size_multiplier {max(args.tp_size // kv_heads, 1)}"
            )
        order: KVOrder = "consecutive" if args.hw_backend == "trn2" else "strided"
        return Layout(args.tp_size, replicas, order)

    def _stage(self, name: str, args: Any, partitions: list[str]) -> int | None:
        """Return a parameter's pipeline rank (virtual stages in turn), or None if all have it."""
        if "embed_tokens" in name or "wte" in name:
            return 0
        if any(part in name for part in ("lm_head", "model.norm.weight", "norm_f.weight")):
            return args.pp_size - 1
        if self.layer_name not in name.split("."):
            return None
        # Names are model.layers.N...; a stage ends with the layer that partitions names. The
        # stage is the number of ends before the layer. With virtual pipeline stages there are
        # more stages than pipeline ranks, and rank r has the stages r, r + pp_size, ...
        layer = int(name.split(".")[2])
        ends = [int(last_layer.split(".")[2]) for last_layer in partitions]
        stage = sum(layer > end for end in ends)
        return stage % args.pp_size

    def _pad(self, name: str, shard: Tensor, args: Any, config: dict[str, Any]) -> Tensor:
        """Return an MLP's shard, padded to a multiple of ``--i_tp_round_factor`` of its width."""
        factor = args.i_tp_round_factor
        is_mlp = any(part in name for part in ("gate_proj", "up_proj", "down_proj"))
        if not factor or not is_mlp:
            return shard
        width = self._expert_width(args, config)
        return pad_to_multiple(shard, self.get_partition_dim(name), width, factor, name)

    def _expert_width(self, args: Any, config: dict[str, Any]) -> int:
        """Return the width of an MLP on one rank, without padding."""
        # DBRX has a section for the sizes of its MLP.
        if "ffn_config" in config:
            return self._get_config_value(config["ffn_config"], "ffn_hidden_size") // args.tp_size
        return self._get_config_value(config, "intermediate_size") // args.tp_size

    def convert_partial_state_to_fused_qkv(
        self, partial_state: State, keys_nxd_to_hf: dict[str, str], num_hidden_layers: int
    ) -> State:
        """Replace ``weight_q``, ``weight_k`` and ``weight_v`` with their concatenation."""
        del keys_nxd_to_hf, num_hidden_layers
        for name in [name for name in partial_state if name.endswith("qkv_proj.weight_q")]:
            weights = [partial_state.pop(f"{name[:-1]}{letter}") for letter in "qkv"]
            fused = name.replace("qkv_proj.weight_q", self.get_fused_qkv_key())
            partial_state[fused] = torch.cat(weights, self.qkv_partition_dim)
        return partial_state

    # Shards to a full state dict

    def merge_tp_checkpoints(self, args: Any) -> State:
        """Return the full state dict, from the files of all ranks.

        Raises:
            ValueError: a file is missing or damaged, or replicas of a KV head differ.
        """
        config = self._config(args)
        heads = self._heads(config)
        layout = self._layout(args, heads)
        _, inverse = self.get_hf_to_nxd_model_keys(args.qkv_linear, heads[0] != heads[1])
        # shards[name][tp_rank] has one tensor per (pp_rank, ep_rank) that has the parameter.
        # Expert ranks come in the order in which _merge concatenates them.
        shards: dict[str, list[list[Tensor]]] = {}
        for ranks in self._all_ranks(args):
            tp_rank = ranks[0]
            for name, value in self._read(args, config, heads, ranks).items():
                if name not in shards:
                    shards[name] = [[] for _ in range(args.tp_size)]
                shards[name][tp_rank].append(value)
        full = {}
        for name, rank_shards in shards.items():
            target = name
            if args.qkv_linear:
                target = self.get_weight_key({}, inverse, name, False)
            full[target] = self._merge(target, rank_shards, layout)
        return self.post_process_full_state_after_tp_conversion(full, args)

    def _read(self, args: Any, config: dict[str, Any], heads: tuple[int, int], ranks: tuple[int, int, int]) -> State:
        """Return one rank's tensors, with fused parameters split and padding removed."""
        load = self.load_partial_xser if args.load_xser else self.load_partial_no_xser
        partial = load(args, *ranks)
        # Training checkpoints have the state dict under a key, exports are the state dict itself.
        if isinstance(partial.get(args.model_key), dict):
            partial = partial[args.model_key]
        if args.fuse_qkv and args.qkv_linear:
            counts = (heads[0], heads[1] * args.kv_size_multiplier)
            partial = unfuse_qkv(partial, counts, self.get_fused_qkv_key())
        # Parameters are split here, on one rank's tensors: a fused shard is [its rows of the
        # first part, its rows of the second, ...], so the parts must be separated before ranks
        # are concatenated. This holds for biases too.
        state: State = {}
        for name, value in partial.items():
            if "gate_up_proj" in name:
                dim = self.get_partition_dim(name)
                gate, up = value.chunk(2, dim)
                gate_name = name.replace("gate_up_proj", "gate_proj")
                up_name = name.replace("gate_up_proj", "up_proj")
                state[gate_name] = self._unpad(gate, dim, args, config)
                state[up_name] = self._unpad(up, dim, args, config)
            elif "down_proj" in name:
                state[name] = self._unpad(value, self.get_partition_dim(name), args, config)
            elif name.endswith(self.get_fused_qkv_key()) or ("qkv_proj.weight_" in name and not args.qkv_linear):
                raise ValueError(
                    f"the files hold {name}, of GQAQKVColumnParallelLinear: pass --qkv_linear, "
                    "and --fuse_qkv if the files hold weight_qkv"
                )
            elif "qkv_proj." in name and not args.qkv_linear:
                parts = split_heads(value, heads, self.qkv_partition_dim)
                for letter, part in zip("qkv", parts, strict=True):
                    state[name.replace("qkv_proj", f"{letter}_proj")] = part
            else:
                state[name] = value
        return state

    def _unpad(self, value: Tensor, dim: int, args: Any, config: dict[str, Any]) -> Tensor:
        """Undo ``_pad``, which pads every MLP."""
        if not args.i_tp_round_factor:
            return value
        return value.narrow(dim, 0, self._expert_width(args, config))

    def _merge(self, name: str, rank_shards: list[list[Tensor]], layout: Layout) -> Tensor:
        """Return the full parameter; ``rank_shards`` as the values of ``shards`` in the caller."""
        # Experts of expert-parallel ranks are concatenated; other parameters are equal on
        # pipeline ranks that share them, and the first is taken. It is cloned, because the
        # tensors are views of memory-mapped files, which a program may replace afterwards.
        if "expert_mlps" in name:
            rank_shards = [[torch.cat(experts)] for experts in rank_shards]
        stored = [tensors[0] for tensors in rank_shards if tensors]
        kind = self._kind(name)
        if kind == "replicated":
            return stored[0].clone()
        return torch.cat(order_slices(name, stored, layout, kind), self.get_partition_dim(name))

    # Files

    def _config(self, args: Any) -> dict[str, Any]:
        if not args.config:
            raise ValueError("--config is needed: the model's config.json says how many heads there are")
        return json.loads(Path(args.config).read_text(encoding="utf-8"))

    def load_full_state(self, args: Any) -> State:
        return load_full(args)

    def get_input_filename(self, args: Any, tp_rank: int, pp_rank: int, ep_rank: int, xser: bool) -> str:
        """Return the first existing file of the names in neuronx-distributed's releases."""
        return find_input(args.input_dir, tp_rank, pp_rank, ep_rank, xser=bool(xser))

    def get_output_filename(self, args: Any, tp_rank: int, pp_rank: int, ep_rank: int, xser: bool) -> str:
        del xser
        return output_file(args, tp_rank, pp_rank, ep_rank)

    def load_partial_xser(self, args: Any, tp_rank: int, pp_rank: int, ep_rank: int) -> Any:
        return read_partial(Path(self.get_input_filename(args, tp_rank, pp_rank, ep_rank, True)))

    def load_partial_no_xser(self, args: Any, tp_rank: int, pp_rank: int, ep_rank: int) -> Any:
        return read_partial(Path(self.get_input_filename(args, tp_rank, pp_rank, ep_rank, False)))

    def save_full(self, args: Any, full_state: State) -> None:
        path = Path(args.output_dir) / "checkpoint.pt"
        print(f"writing {path}")
        write_tensors(path, full_state)

    def save_partial_xser(self, args: Any, partial_state: State, tp_rank: int, pp_rank: int, ep_rank: int) -> None:
        path = self.get_output_filename(args, tp_rank, pp_rank, ep_rank, True)
        write_partial(Path(path), partial_state, xser=True)

    def save_partial_no_xser(self, args: Any, partial_state: State, tp_rank: int, pp_rank: int, ep_rank: int) -> None:
        path = self.get_output_filename(args, tp_rank, pp_rank, ep_rank, False)
        write_partial(Path(path), partial_state, xser=False)

    # Commands

    def convert_from_full_state(self, args: Any) -> None:
        """Write the files of all ranks from the full state dict in ``args.input_dir``."""
        config = self._config(args)
        full_state = self.load_full_state(args)
        partitions = self._partitions(full_state, args.pp_size * args.virtual_pp_size)
        if args.coalesce_qkv:
            full_state = self.coalesce_qkv(full_state, config, args.tp_size)
        full_state = self.pre_process_full_state_before_tp_conversion(full_state, args)
        save = self.save_partial_xser if args.save_xser else self.save_partial_no_xser
        # One rank at a time: the host needs memory for the full state dict and one rank's shards.
        for ranks in self._all_ranks(args):
            partial = self.convert_full_state_to_tp(full_state, args, *ranks, partitions, config)
            save(args, partial, *ranks)

    def _partitions(self, names: Iterable[str], stages: int) -> list[str]:
        """Return the last layer of each stage except the last; last stages take the remainder."""
        # Sorted by number: in the order of texts "layers.10" comes before "layers.2".
        matches = (re.match(self.layer_name_pattern, name) for name in names)
        layer_names = {match[1] for match in matches if match}
        layers = sorted(layer_names, key=lambda name: int(name.split(".")[-1]))
        if not 1 <= stages <= len(layers):
            raise ValueError(f"{stages} pipeline stages need as many layers, the state dict has {len(layers)}")
        # 10 layers in 4 stages: each 2, remainder 2, lengths [2, 2, 3, 3].
        # The last layers are then those at the running sums minus 1: 1, 3 and 6.
        length, remainder = divmod(len(layers), stages)
        lengths = [length] * (stages - remainder) + [length + 1] * remainder
        return [layers[end - 1] for end in accumulate(lengths[:-1])]

    def _all_ranks(self, args: Any) -> list[tuple[int, int, int]]:
        """Return ``(tp_rank, pp_rank, ep_rank)`` of all files; the expert rank varies fastest."""
        return list(product(range(args.tp_size), range(args.pp_size), range(args.ep_size)))

    def convert_to_full_state(self, args: Any) -> None:
        """Write ``args.output_dir/checkpoint.pt`` from the rank files in ``args.input_dir``."""
        self.save_full(args, self.merge_tp_checkpoints(args))

    def convert_from_xser(self, args: Any) -> None:
        """Write each rank's xser file as one file."""
        for ranks in self._all_ranks(args):
            self.save_partial_no_xser(args, self.load_partial_xser(args, *ranks), *ranks)

    def convert_to_xser(self, args: Any) -> None:
        """Write each rank's file in the xser format."""
        for ranks in self._all_ranks(args):
            self.save_partial_xser(args, self.load_partial_no_xser(args, *ranks), *ranks)

    def run(self, args: Any) -> None:
        """Run the conversion of the one ``--convert_*`` flag in ``args``.

        Raises:
            ValueError: for no or several flags, an unsupported option, or files that do not fit.
        """
        require_supported(args)
        chosen = [flag for flag in CONVERSIONS if getattr(args, flag)]
        if len(chosen) != 1:
            raise ValueError(f"exactly one of {[f'--{flag}' for flag in CONVERSIONS]} must be given, got {chosen}")
        getattr(self, chosen[0])(args)
