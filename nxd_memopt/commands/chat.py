"""The command ``nxd-memopt chat``: a quick look at what a Hugging Face directory or an adapter answers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_memopt._optional import is_importable, require_transformers
from nxd_memopt.command_line import FlagParser, count
from nxd_memopt.lora_config import ADAPTER_CONFIG


def main(arguments: Sequence[str]) -> int:
    """Answer ``--prompt``, or what a person types until an empty line; return 0.

    Raises:
        ValueError: the directory has no model that can be loaded, or the conversation is too long for it.
    """
    options = _parser().parse_args(list(arguments))
    if options.prompt == "":
        raise ValueError("--prompt is empty: write a text, or leave it out and type")
    _require_model(options.directory)
    require_transformers("nxd-memopt chat")
    chat = Chat(*load(options.directory), max_tokens=options.max_tokens, temperature=options.temperature)
    if options.prompt is not None:
        chat.answer(options.prompt)
        return 0
    print("An empty line or Ctrl-D ends; Ctrl-C stops an answer.", file=sys.stderr)
    while prompt := _typed():
        try:
            chat.answer(prompt)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            chat.forget_question()
    return 0


def _parser() -> FlagParser:
    parser = FlagParser("chat", "Show what a model answers, on the GPU if there is one.")
    parser.add_argument("directory", type=Path, help="a Hugging Face directory, such as a run's export/, or an adapter")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and end; default: answer what is typed")
    parser.add_argument("--max-tokens", type=count, default=256, metavar="N", help="longest answer; default: 256")
    greedy = "0, the default, takes the most probable token each time"
    parser.add_argument("--temperature", type=_temperature, default=0.0, metavar="X", help=greedy)
    return parser


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or above, got {text}")
    return value


def _typed() -> str:
    """Return the next line of a person; empty at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _require_model(directory: Path) -> None:
    """Raise ``ValueError`` if ``directory`` does not exist, or has something else, such as a run or its checkpoint."""
    # The adapter and the export of a run exist at its end.
    run = directory.parent
    if not directory.is_dir() and any(run.glob("checkpoints/step_*")):
        raise ValueError(
            f"{directory} does not exist, and {run} is a run that has not finished: nxd-memopt convert --from "
            f"checkpoint --source {run} --target DIRECTORY makes a model of its newest checkpoint"
        )
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is no directory: name one with a model; hf download NAME --local-dir DIRECTORY brings one of "
            "the Hugging Face Hub"
        )
    if (directory / "export").is_dir():
        raise ValueError(f"{directory} is a run: name its model, {directory / 'export'}")
    # A checkpoint, the directory of checkpoints, or a run.
    for pattern in ("rank_*.safetensors", "step_*", "checkpoints/step_*"):
        if any(directory.glob(pattern)):
            raise ValueError(
                f"{directory} has a training checkpoint: nxd-memopt convert --from checkpoint --source {directory} "
                "--target DIRECTORY makes a model of it"
            )
    if not (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no model: name a directory with a config.json")


def load(directory: Path) -> tuple[Any, Any]:
    """Return transformers' model and its tokenizer.

    Raises:
        ValueError: the directory lacks weights of the model, or has adapters and PEFT is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    is_adapter = (directory / ADAPTER_CONFIG).is_file()
    if is_adapter and not is_importable("peft"):
        raise ValueError(
            f"{directory} has adapters, which need the package peft: pip install peft, or name the run's export/, in "
            "which they are merged"
        )
    disable_progress_bar()
    files: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    # transformers loads the base that an adapter names, and puts the adapter into it. It only warns of weights that
    # the files lack, which then are random.
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True, **files)
    model, found = loaded
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise ValueError(f"{directory} lacks {len(missing)} weights of the model, such as {missing[0]}: copy it again")
    # transformers' program, without the library's backend: on Trainium that would take a core, which a run may have.
    if torch.cuda.is_available():
        model = model.cuda()
    return model.eval(), AutoTokenizer.from_pretrained(directory, **files)


class Chat:
    """A conversation with a model; without a chat template each prompt is a text that is continued.

    Args:
        model: transformers' model.
        tokenizer: its tokenizer.
        max_tokens: most tokens of an answer.
        temperature: 0 takes the most probable token each time.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int, temperature: float) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        # What ends an answer for the model, and for the tokenizer whose template it was trained with: of an adapter
        # the model's is the base's.
        ends = model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        padding = tokenizer.pad_token_id
        self._options: dict[str, Any] = {
            "eos_token_id": sorted(ends) or None,
            "pad_token_id": tokenizer.eos_token_id if padding is None else padding,
            "do_sample": temperature > 0,
        }
        if temperature > 0:
            self._options["temperature"] = temperature
        self._messages: list[dict[str, str]] = []

    def answer(self, prompt: str) -> str:
        """Print the answer as it is generated, and return it.

        Raises:
            ValueError: the conversation leaves the model no position for an answer.
        """
        if self._tokenizer.chat_template is None:
            inputs = self._tokenizer(prompt, return_tensors="pt")
        else:
            self._messages.append({"role": "user", "content": prompt})
            inputs = self._tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        ids = inputs["input_ids"].to(self._model.device)
        given, positions = ids.size(1), self._model.config.max_position_embeddings
        most = min(self._max_tokens, positions - given)
        if most < 1:
            raise ValueError(f"the conversation has {given} tokens, and the model {positions} positions: start again")
        mask = inputs["attention_mask"].to(ids.device)
        found = self._model.generate(
            input_ids=ids, attention_mask=mask, streamer=self._streamer(), max_new_tokens=most, **self._options
        )
        answered = found[0, given:]
        if len(answered) == most and int(answered[-1]) not in (self._options["eos_token_id"] or []):
            print(f"[cut after {most} tokens]", file=sys.stderr)
        text = self._tokenizer.decode(answered, skip_special_tokens=True)
        if self._messages:
            self._messages.append({"role": "assistant", "content": text})
        return text

    def _streamer(self) -> Any:
        """Return what prints the tokens as words."""
        from transformers import TextStreamer

        from nxd_memopt.training.reporting.step_metrics import printable

        class Printed(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                super().on_finalized_text(printable(text), stream_end)

        return Printed(self._tokenizer, skip_prompt=True, skip_special_tokens=True)

    def forget_question(self) -> None:
        """Take back a question whose answer was stopped."""
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()
