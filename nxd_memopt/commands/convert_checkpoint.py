"""Writes a training checkpoint as a Hugging Face directory or as adapters for PEFT, for the command ``convert``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nxd_memopt.checkpoint import load_config, save_pretrained
from nxd_memopt.checkpoint.files import open_weights
from nxd_memopt.checkpoint.huggingface.adapters import save_adapters
from nxd_memopt.checkpoint.huggingface.base import find_base
from nxd_memopt.checkpoint.huggingface.exporting import require_replaceable
from nxd_memopt.checkpoint.huggingface.gguf import weights_directory
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.checkpoint.stored_weights import StoredWeights
from nxd_memopt.models import model_class
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.training.config.lora import recorded_lora, recorded_section
from nxd_memopt.training.config.moe import MoEOptions, resolve_options
from nxd_memopt.training.lora import require_function_of

if TYPE_CHECKING:
    from torch import nn

    from nxd_memopt.checkpoint.files import Sources


class CheckpointSource:
    """A training checkpoint that is read tensor by tensor, on one process, whatever T, D and ZeRO stage wrote it.

    Args:
        checkpoint: directory of the checkpoint.
        base: directory of the base of its adapters (LoRA); None is the directory that the checkpoint names.

    Raises:
        ValueError: the checkpoint is damaged, or ``base`` has other weights than its adapters were trained on.
    """

    def __init__(self, checkpoint: Path, base: Path | None) -> None:
        self._checkpoint = checkpoint
        self._index = Index(checkpoint)
        self._lora = recorded_lora(self._index.content["config"])
        self._base: Path | None = None
        recorded = self._index.base
        if recorded is not None:
            self._base = find_base(recorded, checkpoint, [base or recorded["directory"]])
        elif base is not None:
            raise ValueError(f"--base {base}: {checkpoint} has all weights: leave it out")

    def directories(self) -> list[Path]:
        """Return the directories that are read."""
        return [self._checkpoint] if self._base is None else [self._checkpoint, self._base]

    def write_model(self, target: Path, *, max_shard_size_bytes: int) -> None:
        """Write the model, with its adapters merged, as the run's own export; the host needs memory for one file."""
        require_replaceable(target.resolve())  # before a large base is converted
        model = self._model()
        with ExitStack() as stack:
            sources: Sources = {}
            if self._base is not None:
                sources = stack.enter_context(open_weights(stack.enter_context(weights_directory(self._base))))
            save_pretrained(
                model,
                target,
                max_shard_size_bytes=max_shard_size_bytes,
                companions=self._checkpoint,
                read=StoredWeights(self._index, model, sources).read,
            )

    def write_adapters(self, target: Path) -> None:
        """Write the adapters in PEFT's format, as the run's own directory ``adapter``."""
        if self._lora is None:
            raise ValueError(f"--to peft: {self._checkpoint} has no adapters (LoRA): leave --to out")
        model = self._model()
        if self._base is not None:
            # Equal weight files with another configuration, such as another rope_theta, are another model: PEFT would
            # compute other logits than the run.
            try:
                require_function_of(str(self._base), load_config(self._checkpoint))
            except ValueError as error:
                raise ValueError(f"--to peft: the base computes something else: {error}: leave --to out") from error
        save_adapters(
            model,
            target,
            self._lora,
            base_model=None if self._base is None else str(self._base),
            companions=self._checkpoint,
            read=StoredWeights(self._index, model, {}).read,
        )

    def _model(self) -> nn.Module:
        """Return the run's model on the meta device, without memory: each tensor is read when it is written."""
        config = load_config(self._checkpoint)
        moe = resolve_options(recorded_section(MoEOptions, "moe", self._index.content["config"]), config)
        experts = {} if moe is None else {"moe": moe}
        model = model_class(config.model_type)(config, dtype=cast(Any, config.dtype), device="meta", **experts)
        if self._lora is not None:
            add_adapters(model, self._lora)
        return model
