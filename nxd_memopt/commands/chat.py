"""The command ``nxd-memopt chat``: a quick look at what a Hugging Face directory or an adapter answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_memopt._optional import is_importable, require_transformers
from nxd_memopt.command_line import count
from nxd_memopt.lora_config import ADAPTER_CONFIG


def main(arguments: Sequence[str]) -> int:
    """Answer ``--prompt``, or what a person types until an empty line; return 0.

    Raises:
        ValueError: the directory has no model that can be loaded.
    """
    options = _parser().parse_args(list(arguments))
    directory = _model_directory(options.directory)
    require_transformers("nxd-memopt chat")
    model, tokenizer = load(directory)
    chat = Chat(model, tokenizer, max_tokens=options.max_tokens, temperature=options.temperature)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nxd-memopt chat", description=__doc__)
    parser.add_argument("directory", type=Path, help="a Hugging Face directory, such as a run's export/, or an adapter")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and end; default: answer what is typed")
    parser.add_argument("--max-tokens", type=count, default=256, metavar="N", help="longest answer; default: 256")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    return parser


def _typed() -> str:
    """Return the next line of a person; empty at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _model_directory(directory: Path) -> Path:
    """Return ``directory`` if it has a model.

    Raises:
        ValueError: it does not exist, or has something else, such as a run or a checkpoint of training.
    """
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is no directory: name one with a model; hf download NAME --local-dir DIRECTORY brings one of "
            "the Hugging Face Hub"
        )
    if list(directory.glob("rank_*.safetensors")):
        raise ValueError(
            f"{directory} is a training checkpoint: nxd-memopt convert --from checkpoint --source {directory} "
            "--target DIRECTORY makes a model of it"
        )
    if (directory / ADAPTER_CONFIG).is_file() or (directory / "config.json").is_file():
        return directory
    remedy = "name a directory with a config.json"
    if (directory / "export").is_dir():
        remedy = f"it is a run, whose model is in {directory / 'export'}"
    raise ValueError(f"{directory} has no model: {remedy}")


def load(directory: Path) -> tuple[Any, Any]:
    """Return transformers' model, on the GPU if the backend is cuda and else on the host, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from nxd_memopt.backends import backend

    # transformers loads the base that the adapter names, and puts the adapter into it, by PEFT.
    if (directory / ADAPTER_CONFIG).is_file() and not is_importable("peft"):
        raise ValueError(
            f"{directory} has adapters, which need the package peft: pip install peft, or name the run's export/, in "
            "which they are merged"
        )
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True).eval()
    if backend.name == "cuda":
        model = model.to(backend.device)
    return model, AutoTokenizer.from_pretrained(directory, local_files_only=True)


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
        self._options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self._options["temperature"] = temperature
        self._messages: list[dict[str, str]] = []

    def answer(self, prompt: str) -> str:
        """Print the answer as it is generated, and return it."""
        from transformers import TextStreamer

        if self._tokenizer.chat_template is None:
            inputs = self._tokenizer(prompt, return_tensors="pt")
        else:
            self._messages.append({"role": "user", "content": prompt})
            inputs = self._tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        inputs = inputs.to(self._model.device)
        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        # Where there is no padding token, the end of the text, as transformers takes with a warning.
        padding = self._tokenizer.pad_token_id
        ids = self._model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            streamer=streamer,
            pad_token_id=self._tokenizer.eos_token_id if padding is None else padding,
            **self._options,
        )
        text = self._tokenizer.decode(ids[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)
        if self._messages:
            self._messages.append({"role": "assistant", "content": text})
        return text

    def forget_question(self) -> None:
        """Take back a question whose answer was stopped."""
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()
