"""Compares the special token ids of tokenizer, config and generation config, and chooses those of the export."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nxd_memopt.checkpoint.files import find_gguf, read_json
from nxd_memopt.training.config.train_config import ModelConfig

GENERATION_CONFIG = "generation_config.json"
OPTION = "data.end_of_text"
KINDS = {
    "eos_token_id": "end-of-text",
    "bos_token_id": "begin-of-text",
    "pad_token_id": "padding",
}

Ids = dict[str, list[int]]
"""Token ids by the name of their entry in a configuration; an entry without an id is left out."""


@dataclass(frozen=True)
class SpecialTokens:
    """Special token ids: the end of text used in training, and all ids of the export.

    Args:
        end_of_text: id that ends every training document; one of ``config["eos_token_id"]``.
        config: ids of the export's ``config.json``.
        generation: content of the export's ``generation_config.json``, or None for no file.
        notes: one line for each kind of token on which the files disagree.
    """

    end_of_text: int
    config: Ids = field(default_factory=dict)
    generation: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def ends_of_answers(self) -> list[int]:
        """Return the tokens at which transformers stops to generate with the export."""
        ends = (self.generation or {}).get("eos_token_id", self.config["eos_token_id"])
        return ends if isinstance(ends, list) else [ends]

    def config_of_export(self, hf_config: PretrainedConfig) -> PretrainedConfig:
        """Return a copy of ``hf_config`` with the export's ids."""
        # A copy: the model that is trained keeps its own pad_token_id, because an embedding gives that row no gradient.
        exported = copy.deepcopy(hf_config)
        for name in KINDS:
            setattr(exported, name, _plain(self.config.get(name, [])))
        return exported

    def write_companions(self, tokenizer: Any, directory: Path) -> None:
        """Write the tokenizer and the generation config with the export's ids to ``directory``."""
        tokenizer = copy.deepcopy(tokenizer)
        # A tokenizer that ends texts with another token than the model was trained with would never stop a generation.
        if tokenizer.eos_token_id not in self.config["eos_token_id"]:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(self.end_of_text)
        padding = self.config.get("pad_token_id")
        if tokenizer.pad_token_id is None and padding:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding[0])
        tokenizer.save_pretrained(directory)
        if self.generation is not None:
            text = json.dumps(self.generation, indent=2) + "\n"
            (directory / GENERATION_CONFIG).write_text(text, encoding="utf-8")


def special_tokens(
    config: ModelConfig,
    hf_config: PretrainedConfig,
    tokenizer: Any,
    end_of_text: str | int = "auto",
) -> SpecialTokens:
    """Compare the ids of the tokenizer and of the model's files, and choose the ids to use.

    A list of end-of-text ids, as chat models have, is accepted if it contains the id that documents
    end with. Begin-of-text and padding ids come from the tokenizer, else from config.json, else from
    the generation config; an id without a row in the embedding is left out.

    Args:
        config: names the model's directory and the overridden values.
        hf_config: the model's configuration.
        tokenizer: the run's tokenizer.
        end_of_text: ``data.end_of_text``.

    Raises:
        ValueError: no end-of-text id is known, several are and the tokenizer chooses none, or the
            tokenizer's is not one of the model's; ``end_of_text`` is no token; or the generation
            config is damaged.
    """
    stated = _stated_ids(config, hf_config)
    generation = _generation_config(config)
    generating = _ids(generation or {})
    # Three sources: the tokenizer makes the training text, config.json is what a loaded model has, and the generation
    # config is what ends an answer at inference.
    own = _ids({name: getattr(tokenizer, name) for name in KINDS})
    end = _end_of_text(own, stated, generating, tokenizer, end_of_text)

    # A list that contains the id stays as it is: config.json takes the first one, the generation config the last one.
    ends = [ids["eos_token_id"] for ids in (stated, generating) if end in ids.get("eos_token_id", [])]
    chosen: Ids = {"eos_token_id": ends[0] if ends else [end]}
    for name in ("bos_token_id", "pad_token_id"):
        found = [ids[name] for ids in (own, stated, generating) if name in ids]
        # A padding token that was added to the tokenizer alone has no row in the embedding, and -1 in a config is none.
        found = [ids for ids in found if min(ids) >= 0 and max(ids) < hf_config.vocab_size]
        if found:
            chosen[name] = found[0]
    generation_ids = chosen | ({"eos_token_id": ends[-1]} if ends else {})
    if generation is not None:
        generation = dict(generation) | {name: _plain(ids) for name, ids in generation_ids.items()}

    sources = {"the tokenizer": own, "config.json": stated, GENERATION_CONFIG: generating}
    notes = [_disagreement(name, sources, chosen, end) for name in KINDS]
    return SpecialTokens(end, chosen, generation, [note for note in notes if note])


def _stated_ids(config: ModelConfig, hf_config: PretrainedConfig) -> Ids:
    """Return the ids that the model's files or overrides state.

    transformers fills in defaults (LLaMA's are bos 1 and eos 2), which say nothing about this
    model.
    """
    names = set(config.config_overrides)
    if config.pretrained is not None:
        directory = Path(config.pretrained)
        if (directory / "config.json").is_file():
            names |= read_json(directory / "config.json").keys()
        elif find_gguf(directory) is not None:
            names |= KINDS.keys()
    return _ids({name: getattr(hf_config, name, None) for name in KINDS if name in names})


def _generation_config(config: ModelConfig) -> dict[str, Any] | None:
    """Return the content of the model's ``generation_config.json``, or None without one."""
    if config.pretrained is None or not (Path(config.pretrained) / GENERATION_CONFIG).is_file():
        return None
    return read_json(Path(config.pretrained) / GENERATION_CONFIG)


def _ids(values: Mapping[str, Any]) -> Ids:
    """Return the ids of ``values``, each as a list."""
    found: Ids = {}
    for name in KINDS:
        value = values.get(name)
        if value is None:
            continue
        ids: list[Any] = value if isinstance(value, list) else [value]
        # type(), not isinstance(): a bool is an int too
        if any(type(token) is not int for token in ids):
            raise ValueError(f"{name} {value!r} is no token id: correct it in config.json or {GENERATION_CONFIG}")
        if ids:
            found[name] = ids
    return found


def _end_of_text(own: Ids, stated: Ids, generating: Ids, tokenizer: Any, option: str | int) -> int:
    """Return the id that ends every document."""
    if option != "auto":
        return _token_id(tokenizer, option)
    config_ids, generation_ids = stated.get("eos_token_id", []), generating.get("eos_token_id", [])
    others = [*config_ids, *(token for token in generation_ids if token not in config_ids)]
    candidates = own.get("eos_token_id") or config_ids or generation_ids
    if not candidates:
        raise ValueError(
            f"neither the tokenizer {tokenizer.name_or_path!r} nor the model has an eos_token to end documents "
            f"with: set {OPTION} to a token or its id"
        )
    end = candidates[0]
    if len(candidates) > 1 or (others and end not in others):
        raise ValueError(
            f"the tokenizer's end-of-text token is {_named(tokenizer, own.get('eos_token_id', [])) or 'none'} and the "
            f"model's is {_named(tokenizer, others)}: set {OPTION} to the one that documents shall end with"
        )
    return end


def _token_id(tokenizer: Any, option: str | int) -> int:
    """Return the id of ``data.end_of_text``, a token or an id."""
    known = tokenizer.get_vocab()
    if isinstance(option, int):
        if not 0 <= option < len(tokenizer):
            raise ValueError(f"{OPTION} {option} is outside [0, {len(tokenizer)}), the tokenizer's ids: name a token")
        return option
    if option not in known:
        special = ", ".join(repr(token) for token in tokenizer.all_special_tokens)
        raise ValueError(
            f"{OPTION} {option!r} is no token of the tokenizer: its special tokens are {special or 'none'}"
        )
    return known[option]


def _named(tokenizer: Any, ids: list[int]) -> str:
    """Return ids with their tokens, for a message."""
    return " or ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in ids)


def _plain(ids: list[int]) -> int | list[int] | None:
    """Return ids as a configuration has them: a number, a list of several, or None."""
    if len(ids) > 1:
        return list(ids)
    return ids[0] if ids else None


def _disagreement(name: str, sources: Mapping[str, Ids], chosen: Ids, end: int) -> str | None:
    """Return a line if the sources state different ids."""
    stated = {source: ids[name] for source, ids in sources.items() if name in ids}
    if len({tuple(sorted(ids)) for ids in stated.values()}) <= 1:
        return None
    values = ", ".join(f"{source} has {_plain(ids)}" for source, ids in stated.items())
    ending = f"; documents end with {end}" if name == "eos_token_id" else ""
    return f"{KINDS[name]} token: {values}{ending}; the export has {_plain(chosen.get(name, []))}"
