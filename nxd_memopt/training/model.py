"""Builds the model from a Hugging Face directory or a configuration alone, and loads its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import load_config, load_pretrained
from nxd_memopt.checkpoint.files import find_gguf
from nxd_memopt.models import model_class, require_supported
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.training.config import ModelConfig, TrainConfig
from nxd_memopt.training.tokens import Vocabulary

DROPOUTS = ("attention_dropout", "hidden_dropout")  # the dropout options that our models read


def load_hf_config(config: ModelConfig) -> PretrainedConfig:
    """Return the Hugging Face configuration, updated with ``config_overrides``.

    Raises:
        ValueError: the directory does not exist, or the model type is not supported.
    """
    # The type is checked before transformers builds a configuration of it: transformers knows
    # hundreds of types, and the error must name the few that this library has.
    overrides = dict(config.config_overrides)
    if config.pretrained is None:
        model_type = overrides.pop("model_type")
        require_supported(model_type)
        return AutoConfig.for_model(model_type, **overrides)
    hf_config = load_config(config.pretrained)
    require_supported(hf_config.model_type)
    # A pretrained directory has its own type; setting the attribute would not change the class.
    overrides.pop("model_type", None)
    hf_config.update(overrides)
    return hf_config


def require_executable(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if the backend does not support ``compile`` or ``enable_cuda_graph: true``.

    Called before the model is built.
    """
    conflict = cuda_graph_conflict(config, hf_config)
    if config.trainer.enable_cuda_graph is True and conflict is not None:
        raise ValueError(f"trainer.enable_cuda_graph is true, but {conflict}, or enable_cuda_graph to auto")
    if not config.trainer.compile:
        return
    refusal = backend.compile_refusal()
    if refusal is not None:
        raise ValueError(f"trainer.compile {config.trainer.compile!r} {refusal}; or set it to null")


def cuda_graph_conflict(config: TrainConfig, hf_config: PretrainedConfig) -> str | None:
    """Return why a training step of this model cannot be a CUDA graph and how to change it, or None."""
    refusal = backend.capture_refusal()
    if refusal is not None:
        return f"a CUDA graph {refusal}: set enable_cuda_graph to false"
    # Checked here for a remedy that names options of the configuration; GraphedLoss itself
    # refuses to capture a forward that draws random numbers.
    values = {name: getattr(hf_config, name, None) for name in DROPOUTS}
    dropout = {name: value for name, value in values.items() if value}
    if dropout:
        return f"a CUDA graph needs dropout 0, got {dropout}: set them to 0 in model.config_overrides"
    return config.cuda_graph_conflict()


def load_vocabulary(config: ModelConfig, hf_config: PretrainedConfig) -> Vocabulary:
    """Return the tokenizer, checked against the model.

    Raises:
        ValueError: no tokenizer can be loaded, it has no end-of-text token, or it has more tokens
            than the model's vocabulary.
    """
    name = config.tokenizer or config.pretrained
    assert name is not None
    tokenizer = _load_tokenizer(name)
    # Hugging Face models may have a list of end-of-text ids; only a single id can close a
    # document.
    candidates = [tokenizer.eos_token_id, hf_config.eos_token_id]
    end_of_text = next((token for token in candidates if isinstance(token, int)), None)
    if end_of_text is None:
        raise ValueError(f"neither the tokenizer {name!r} nor the model has an eos_token to end documents with")
    return Vocabulary(tokenizer, hf_config.vocab_size, end_of_text)


def _load_tokenizer(name: str) -> Any:
    """Return the transformers tokenizer of a directory, a GGUF file's directory, or a hub name."""
    # transformers reads a GGUF file's tokenizer only if the file is named.
    options = {}
    gguf = find_gguf(Path(name))
    if gguf is not None:
        options = {"gguf_file": gguf.name}
    # ImportError: a tokenizer may need a package such as sentencepiece. Its message has several
    # lines of instructions, of which the first has the reason.
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"no tokenizer can be loaded from {name!r}: {reason}: set model.tokenizer to one's directory"
        ) from error


def build_model(config: TrainConfig, hf_config: PretrainedConfig) -> ParallelCausalLM:
    """Build this rank's shard of the model on the backend's device, and load pretrained weights.

    On XLA with ``use_cpu_initialization`` the shard is initialized and loaded on the host and
    copied afterwards: initializing or loading it on the device, slice by slice, would compile
    another graph.
    """
    on_host = backend.name == "xla" and config.parallel.use_cpu_initialization
    device = torch.device("cpu") if on_host else backend.device
    model: ParallelCausalLM = model_class(hf_config.model_type)(
        hf_config,
        parallel=config.parallel,
        memory=config.memory,
        dtype=getattr(torch, config.model.dtype),
        device=device,
    )
    if config.model.pretrained is not None and not config.model.random_init:
        load_pretrained(model, config.model.pretrained)
    if on_host:
        move_model_to_device(model, backend.device)
    # On XLA the graph of initialization and loading ends here, or it would become part of the
    # first micro-batch's graph.
    backend.mark_step()
    return model
