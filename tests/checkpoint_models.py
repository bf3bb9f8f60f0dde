"""Small transformers models, comparison of models, and a process killed on purpose, for the checkpoint tests."""

from __future__ import annotations

import os
import sys

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

IDS = torch.arange(12).view(1, 12)


def llama_config(**changes):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaConfig(**{**sizes, **heads, **changes})


def neox_config(**changes):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return GPTNeoXConfig(**{**sizes, "num_attention_heads": 4, "max_position_embeddings": 32, **changes})


def build(config, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def assert_same(model, reference):
    wanted = dict(reference.named_parameters())
    assert dict(model.named_parameters()).keys() == wanted.keys()
    for name, param in model.named_parameters():
        assert torch.equal(param, wanted[name].to(param.dtype)), name


def run_killed_at(operation, directory, function):
    """Run ``function`` in a child, killed before its n-th operation on ``directory``; return whether it finished."""
    child = os.fork()
    if child == 0:
        count = 0

        def kill(event, args):
            nonlocal count
            if event.startswith(("open", "os.", "shutil.")) and any(str(directory) in str(arg) for arg in args):
                if count == operation:
                    os._exit(9)
                count += 1

        sys.addaudithook(kill)
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
