"""The command ``nxd-memopt convert``: weights from one checkpoint format to another."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from nxd_memopt.command_line import FlagParser
from nxd_memopt.options import alternatives, field_types
from nxd_memopt.training.config.help import descriptions

if TYPE_CHECKING:
    import torch

    from nxd_memopt.checkpoint.nxd.architectures import QKVForm

SourceFormat = Literal["hf", "nxd", "checkpoint"]
TargetFormat = Literal["hf", "nxd", "peft"]
# Options by the formats that use them.
_TO_NXD = ("pipeline_model_parallel_size", "qkv_linear", "fused_qkv", "xser", "kv_size_multiplier")
_TO_HF = ("max_shard_size_gib",)
_FROM_NXD = ("config", "accept_drift")
_FROM_CHECKPOINT = ("base",)
_OF_NXD = ("tensor_model_parallel_size", "kv_order", "query_key_value_stride")
# The names of two fields, as flags.
_FLAGS = {"source_format": "from", "target_format": "to"}
_EXPERTS = ("num_moe_experts", "moe_router_topk", "moe_shared_expert_intermediate_size", "seed")
_COUNTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "kv_size_multiplier", *_EXPERTS[:3])
# Layout of query, key and value: whether GQAQKVColumnParallelLinear has them, and whether as one
# parameter, with the name of the form.
_FORMS: dict[tuple[bool, bool], QKVForm] = {
    (True, True): "fused",
    (True, False): "linear",
    (False, True): "stacked",
    (False, False): "separate",
}


@dataclass(frozen=True)
class Convert:
    """Convert weights between Hugging Face directories, training checkpoints and neuronx-distributed's files.

    A Hugging Face target gets the tokenizer, chat template and generation config of SOURCE (--from nxd: of the
    directory of --config). Files of neuronx-distributed are of LLaMA and GPT-NeoX. SOURCE stays as it is.

    Args:
        source: hf: directory with config.json and safetensors or .bin files, or with one GGUF file. nxd: a tag's
            directory of nxd.save_checkpoint, or the directory with the rank files. checkpoint: a directory
            step_XXXXXXXX of nxd-memopt train, or a run's output directory, of which the newest checkpoint is read.
        target: directory to write; an export or checkpoint of weights of this program there is replaced.
        source_format: format of SOURCE: Hugging Face, neuronx-distributed, or a training checkpoint.
        target_format: format of TARGET. From checkpoint, hf has the adapters (LoRA) merged into the weights, and peft
            has the adapters alone.
        base: from checkpoint, with adapters: the base that they were trained on; default: the directory that the
            checkpoint names.
        max_shard_size_gib: to hf: upper size of one file, in units of 2^30 bytes.
        config: from nxd: the model's config.json, which neuronx-distributed's files do not contain.
        tensor_model_parallel_size: to nxd: T of the files. From nxd: T that the files must have; default: any.
        pipeline_model_parallel_size: to nxd: pipeline stages. From nxd all stages are merged.
        qkv_linear: to nxd, LLaMA: for GQAQKVColumnParallelLinear (the sample's --qkv_linear): weight_q, weight_k,
            weight_v.
        fused_qkv: to nxd, LLaMA: one parameter for query, key and value (the sample's --fuse_qkv): weight_qkv with
            --qkv-linear.
        kv_size_multiplier: to nxd, LLaMA: ranks with the same KV heads (the sample's --kv_replicator); above 1 implies
            --qkv-linear.
        kv_order: order of the ranks with the same KV heads: strided on trn1, consecutive on trn2. To nxd it is required
            if ranks share KV heads; from nxd the default finds it by comparing the files.
        query_key_value_stride: GPT-NeoX: order of query_key_value's rows. 1: as the sample's attention reads them. 3:
            the files were cut from full weights by the layer's stride=3 (checkpointing.load(sharded=False)) at T above
            1.
        accept_drift: from nxd: take norms and row-parallel biases from rank 0 if ranks differ, as after GPT-NeoX's
            sample, which does not sum their gradients; without it a difference is an error.
        num_moe_experts: from hf to hf, LLaMA: write a Mixtral with this many experts in each layer, copies of its MLP.
        moe_router_topk: with --num-moe-experts: experts of a token, default 2.
        moe_shared_expert_intermediate_size: with --num-moe-experts: width of a gated shared expert, whose down
            projection is zero; writes a Qwen2-MoE.
        seed: with --num-moe-experts: seed of the weights of routers and shared experts, which are drawn at random.
        xser: to nxd: one file per tensor, which neuronx-distributed loads faster. From nxd the format is detected.
    """

    source: Path
    target: Path
    source_format: SourceFormat = "hf"
    target_format: TargetFormat = "hf"
    base: Path | None = None
    max_shard_size_gib: float = 5.0
    config: Path | None = None
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int = 1
    qkv_linear: bool = False
    fused_qkv: bool = False
    kv_size_multiplier: int = 1
    kv_order: Literal["strided", "consecutive"] | None = None
    query_key_value_stride: Literal[1, 3] = 1
    accept_drift: bool = False
    num_moe_experts: int | None = None
    moe_router_topk: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    seed: int = 1234
    xser: bool = False

    def __call__(self) -> None:
        """Check the options, and convert."""
        self._require_options_of_formats()
        self._require_sizes()
        if self.source.resolve() == self.target.resolve():
            raise ValueError(f"--target {self.target} is the source, which stays as it is: choose another")
        # Of a checkpoint or a run; a checkpoint has a config.json too, whose weights would be missing.
        is_run = any(any(self.source.glob(each)) for each in ("rank_*.safetensors", "checkpoints/step_*"))
        if self.source_format == "hf" and is_run:
            raise ValueError(f"--source {self.source} has a training checkpoint: add --from checkpoint")
        if self.source_format == "checkpoint":
            self._from_checkpoint()
        elif self.source_format == "nxd":
            self._from_nxd()
        elif self.target_format == "nxd":
            self._to_nxd()
        else:
            self._to_hugging_face()
        print(f"wrote {self.target}")

    @property
    def _max_shard_size_bytes(self) -> int:
        return int(self.max_shard_size_gib * 2**30)

    def _require_sizes(self) -> None:
        """Raise ``ValueError`` for a size that is not positive."""
        # Shapes are divided by these sizes: 0 would end in a message about a tensor, and a negative
        # one in empty slices.
        for name in _COUNTS:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {size}")
        if not (math.isfinite(self.max_shard_size_gib) and self.max_shard_size_gib > 0):
            raise ValueError(f"--max-shard-size-gib must be a positive number, got {self.max_shard_size_gib}")

    def _require_options_of_formats(self) -> None:
        """Raise ``ValueError`` for an option that the two formats do not use."""
        if self.source_format == self.target_format == "nxd":
            raise ValueError("--from nxd --to nxd is not offered: convert to hf, and from there to the other sizes")
        if self.source_format == "checkpoint" and self.target_format == "nxd":
            raise ValueError("--from checkpoint --to nxd is not offered: convert to hf, and from there to nxd")
        if self.target_format == "peft" and self.source_format != "checkpoint":
            raise ValueError(f"--from {self.source_format} --to peft: only a training checkpoint has adapters")
        formats = (self.source_format, self.target_format)
        # Each group of options, and whether this conversion reads it. An option that is not read
        # would change nothing without a word: files of another layout than asked for.
        used = {
            _TO_NXD: self.target_format == "nxd",
            _TO_HF: self.target_format == "hf",
            _FROM_CHECKPOINT: self.source_format == "checkpoint",
            _FROM_NXD: self.source_format == "nxd",
            _OF_NXD: "nxd" in formats,
            _EXPERTS: self.num_moe_experts is not None and formats == ("hf", "hf"),
        }
        # An option counts as set if its value is not the default: a default that is written out
        # changes nothing and is accepted.
        defaults = {option.name: option.default for option in dataclasses.fields(self)}
        unused = [name for names, is_used in used.items() if not is_used for name in names]
        # All of them at once, so that a command line is corrected in one go.
        names = [name for name in unused if getattr(self, name) != defaults[name]]
        if names:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            remedy = "leave it out, or choose the formats that use it"
            if set(_EXPERTS) & set(names):
                remedy = "leave it out, or set --num-moe-experts, for --from hf --to hf"
            raise ValueError(f"--from {formats[0]} --to {formats[1]} takes no {options}: {remedy}")

    def _from_checkpoint(self) -> None:
        """Convert a training checkpoint to a Hugging Face directory, or its adapters to PEFT's format."""
        from nxd_memopt.commands.convert_checkpoint import CheckpointSource
        from nxd_memopt.training.resume.plan import find_checkpoint

        source = CheckpointSource(find_checkpoint("--source", str(self.source)), self.base)
        for read in source.directories():
            if read.resolve() in (self.target.resolve(), *self.target.resolve().parents):
                raise ValueError(f"--target {self.target} is in {read}, which stays as it is: choose another")
        if self.target_format == "peft":
            source.write_adapters(self.target)
        else:
            source.write_model(self.target, max_shard_size_bytes=self._max_shard_size_bytes)

    def _to_hugging_face(self) -> None:
        """Convert a Hugging Face directory or GGUF file to a Hugging Face directory."""
        from nxd_memopt.checkpoint import load_config, load_pretrained, save_pretrained
        from nxd_memopt.checkpoint.huggingface.companions import companions_of
        from nxd_memopt.checkpoint.huggingface.exporting import require_replaceable
        from nxd_memopt.checkpoint.huggingface.upcycling import load_upcycled, upcycled_config
        from nxd_memopt.models import MODELS, model_class
        from nxd_memopt.modules.moe.hf_options import transformers_type

        require_replaceable(self.target.resolve())  # before the weights are read
        config = load_config(self.source)
        # Experts change the config first: the model's class follows from it, and the model is built
        # with the parameters of the experts.
        if self.num_moe_experts is not None:
            # transformers has a shared expert with a gate only.
            config = upcycled_config(
                config,
                self.num_moe_experts,
                self.moe_router_topk or 2,
                shared_width=self.moe_shared_expert_intermediate_size,
                shared_gate=self.moe_shared_expert_intermediate_size is not None,
            )
            if config.model_type not in MODELS:
                raise ValueError(
                    f"--num-moe-experts {self.num_moe_experts}: transformers has no {transformers_type(config)} with "
                    "experts to write; set moe.num_moe_experts of nxd-memopt train, which trains it without export"
                )
        # The model is built on the meta device, without memory; loading creates its weights. Names
        # and shapes are checked on the way, which copying the files would not do.
        model = model_class(config.model_type)(config, dtype=self._stored_dtype(cast(Any, config.dtype)), device="meta")
        # One copies names and shapes as they are, the other fills every expert with the dense MLP.
        if self.num_moe_experts is None:
            load_pretrained(model, self.source)
        else:
            load_upcycled(model, self.source, seed=self.seed)
        with companions_of(self.source) as companions:
            save_pretrained(model, self.target, max_shard_size_bytes=self._max_shard_size_bytes, companions=companions)

    def _stored_dtype(self, configured: torch.dtype) -> torch.dtype:
        """Return the dtype of the source's weights, whatever its config.json says: another one would round them."""
        from nxd_memopt.checkpoint.files import find_gguf, floating_dtype, open_weights

        # A GGUF file has quantized blocks, which are read as the configured dtype.
        if not self.source.is_dir() or find_gguf(self.source) is not None:
            return configured
        with open_weights(self.source) as sources:
            stored = floating_dtype(sources)
        if stored is None or stored == configured:
            return configured
        print(f"the weights are {stored}, and config.json says {configured}: they are written as {stored}")
        return stored

    def _from_nxd(self) -> None:
        """Convert neuronx-distributed's rank files to a Hugging Face directory."""
        from nxd_memopt.checkpoint.nxd import from_nxd

        # Rank files have shards without the number of heads, from which the order of query, key and
        # value follows.
        if self.config is None:
            raise ValueError("--from nxd needs --config: the model's config.json, which the rank files do not hold")
        from_nxd(
            self.source,
            self.target,
            config=self.config,
            kv_order=self.kv_order,
            query_key_value_stride=self.query_key_value_stride,
            accept_drift=self.accept_drift,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            max_shard_size_bytes=self._max_shard_size_bytes,
        )

    def _to_nxd(self) -> None:
        """Convert a Hugging Face directory to neuronx-distributed's rank files."""
        from nxd_memopt.checkpoint.nxd import to_nxd
        from nxd_memopt.checkpoint.nxd.parts import Layout
        from nxd_memopt.checkpoint.nxd.writing import Target

        size = self.tensor_model_parallel_size
        replicas = self.kv_size_multiplier
        if size is None:
            raise ValueError("--to nxd needs --tensor-model-parallel-size: the files are written for one T")
        # Both orders give files of the same names and shapes, so a wrong one would load without
        # an error and give wrong attention: it is not guessed. With 1 or T replicas they are
        # equal.
        if self.kv_order is None and 1 < replicas < size:
            raise ValueError(
                f"--kv-size-multiplier {replicas} needs --kv-order: strided for trn1, "
                "consecutive for trn2, whose ranks hold the KV heads in other orders"
            )
        layout = Layout(size, replicas, self.kv_order or "consecutive", self.query_key_value_stride)
        # Names of the attention weights: GQAQKVColumnParallelLinear (linear) or plain
        # projections, each with separate parameters or one fused parameter. Replicated KV heads
        # need the former.
        is_linear = self.qkv_linear or replicas > 1
        form = _FORMS[is_linear, self.fused_qkv]
        options = Target(layout, form, self.pipeline_model_parallel_size, self.xser)
        to_nxd(self.source, self.target, options)


def main(arguments: Sequence[str]) -> int:
    """Run the command; its flags are the fields of ``Convert``."""
    Convert(**vars(_parser().parse_args(list(arguments))))()
    return 0


def _parser() -> FlagParser:
    """Return the parser of the fields of ``Convert``."""
    summary, _, _ = inspect.cleandoc(Convert.__doc__ or "").partition("\n\nArgs:")
    parser = FlagParser("convert", summary)
    texts, hints = descriptions(Convert), field_types(Convert)
    for field in dataclasses.fields(Convert):
        flag = f"--{_FLAGS.get(field.name, field.name)}".replace("_", "-")
        kind = alternatives(hints[field.name])[0]
        options: dict[str, Any] = {"type": kind}
        choices = typing.get_args(kind)
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif choices:
            options = {"type": type(choices[0]), "choices": choices}
        if field.default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = field.default
        parser.add_argument(flag, dest=field.name, help=texts[field.name].replace("%", "%%"), **options)
    return parser
