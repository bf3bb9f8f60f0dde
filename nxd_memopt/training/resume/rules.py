"""Says for each option of the training program whether a resumed run may change it."""

from __future__ import annotations

import dataclasses

from nxd_memopt.options import Declaration, Resume, declaration
from nxd_memopt.training.config.train_config import SECTIONS

RULES: dict[str, Declaration] = {
    f"{section}.{field.name}": declaration(field)
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
}
"""What each option, by its dotted name, declares about a resumed run."""

# Options of the model that may change if asked for. All others are its shape, or constants of its
# forward that the weights were trained with.
ARCHITECTURE_WHEN_ASKED = ("attention_dropout", "hidden_dropout")

# Those of its shape, with which no weights of another shape start.
ARCHITECTURE_SHAPE = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "shared_expert_intermediate_size",
    "vocab_size",
)

# Entries of a Hugging Face configuration that no training step depends on. The ids of the end and
# the beginning of a text are part of the tokens, whose content is compared; the row of pad_token_id in
# LLaMA's embedding gets no gradient, so that one counts.
NOT_ARCHITECTURE = {
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def options_when_asked() -> list[str]:
    """Return the names that ``trainer.allow_changes`` accepts."""
    # data.dataset allows other content, not only another path. data.micro_batch_size is asked for with experts.
    names = [name for name, rule in RULES.items() if rule.resume is Resume.WHEN_ASKED]
    return [
        *names,
        "data.micro_batch_size",
        "data.dataset",
        "optimizer.decay_steps",
        *(f"model.config_overrides.{name}" for name in ARCHITECTURE_WHEN_ASKED),
    ]
