"""The ``data`` section: where text comes from, and how it is packed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nxd_memopt.config import require_divisible
from nxd_memopt.options import WARM_START, Resume, check_options, expanded, option, require_at_least

CONVERSATIONS = ("messages", "prompt_completion", "instruction_output")
HELD_OUT_EVERY = 20
# Every format of conversations may have these two, which the chat template reads.
_OF_THE_TEMPLATE = ("tools", "chat_template_kwargs")
FIELDS = {
    "text": (("text",), ()),
    "messages": (("messages",), _OF_THE_TEMPLATE),
    "prompt_completion": (("prompt", "completion"), ("system", *_OF_THE_TEMPLATE)),
    "instruction_output": (("instruction", "output"), ("system", "input", *_OF_THE_TEMPLATE)),
}
"""Format -> the fields that a row must have, and those that it may have, in columns of the same names by default."""
USUAL_COLUMNS: dict[str, tuple[dict[str, str], ...]] = {
    "messages": ({}, {"messages": "conversations"}),
    "prompt_completion": ({}, {"completion": "response"}, {"prompt": "question", "completion": "answer"}),
}
"""Format -> the values of ``data.columns`` that are found by themselves, in this order."""


def columns_by_field(form: str, columns: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the columns that a row must have, and those that it may have, each by its field.

    Args:
        form: a key of ``FIELDS``.
        columns: ``data.columns``.
    """
    required, optional = FIELDS[form]
    # A column that was given to one field is not read a second time for the optional field of its own name.
    taken = set(columns.values())
    return (
        {field: columns.get(field, field) for field in required},
        {field: columns.get(field, field) for field in optional if field in columns or field not in taken},
    )


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it is packed.

    Args:
        dataset: what is trained, which a run has to name (or a ``mixture``): a text, JSONL or
            Parquet file, a directory or pattern of such files, a dataset saved by ``save_to_disk``,
            the ``.idx`` file of tokens in Megatron-LM's format, which this run's tokenizer must
            have made, a name on the Hugging Face hub, a directory with a copy of such a repository,
            or ``stdlib`` (the source code of Python's standard library).
        mixture: several datasets and their weights, instead of ``dataset``: each has its share of
            the trained and of the held-out sequences, and is repeated where it ends. Other options
            of the data are of all of them.
        dataset_config: the hub dataset's configuration name.
        split: the hub dataset's split.
        format: what a row is; ``auto`` takes the first of the others whose columns the first rows
            have. ``text``: a text, in a column of this name. ``messages``: a conversation, a list of
            objects with ``role`` and ``content``, or ShareGPT's ``from`` and ``value``, in a column
            of this name or ``conversations``. ``prompt_completion`` and ``instruction_output``:
            columns of these names, with one question and its answer; ``response`` may stand for
            ``completion``, ``question`` and ``answer`` for both; ``system``, and ``input`` of an
            instruction, are optional. Conversations may have ``tools`` and ``chat_template_kwargs``,
            are rendered by a chat template, and only what the assistant says is trained.
        columns: the columns of these fields where the rows have other names, such as
            ``{text: body}``, ``{prompt: frage, completion: antwort}`` or ``{messages: dialog}``.
        chat_template: Jinja file that replaces the tokenizer's chat template, also in the export.
        train_on_input: train all tokens of a conversation, not only the assistant's.
        long_conversations: what happens to a conversation of more than ``seq_length`` tokens:
            ``cut`` keeps its first ``seq_length`` tokens, ``drop`` leaves it out. Both are counted.
        end_of_text: token that ends every document, as text or id; ``auto`` takes the
            tokenizer's, which must be one of the model's.
        seq_length: S, tokens per sequence. Each document ends with an end-of-text token.
        packing: ``concatenate`` puts documents one after another and cuts the result into
            sequences, the default for text; ``best_fit``, the default for conversations, cuts only
            documents longer than S, places the pieces where the least space is left, and fills the
            end of sequences with tokens that are not trained (arXiv:2404.10830). Positions of a cut
            document start from 0 in the next sequence.
        isolate_documents: attention and positions restart at each document, and a document's
            first token is not predicted from the one before it. False treats a sequence as one
            document.
        micro_batch_size: B, sequences per forward pass on each data-parallel rank.
        global_batch_size: sequences per optimizer step over all data-parallel ranks.
        held_out_every: about one document in this many is kept out of training, chosen by hash;
            with fewer documents than this, the last 1/held_out_every of each document. 0 keeps none
            out of training, and needs ``eval_sequences`` 0 or a ``validation_dataset``. ``auto`` is
            20, and 0 with ``eval_sequences`` 0.
        validation_dataset: text for the held-out loss, of the same kind and columns as ``dataset`` or
            the sources of a ``mixture``, of which nothing is then kept out of training.
        eval_sequences: held-out sequences per evaluation; 0 turns evaluation off.
        on_bad_rows: what a row without text does: a line that is not JSON, a row that is null,
            not text, not UTF-8 or without the text column. ``error`` stops the run before it
            trains; ``skip`` leaves such rows out, and conversations that the chat template cannot render, and
            prints their number with places and reasons.
        streaming: ``true`` reads the data once, in shards, while the run trains: the start and the
            memory do not depend on its size. Files are shuffled, and documents within windows of
            10,000. ``false`` reads and checks all data before training and shuffles it as a whole.
            ``auto`` is ``true`` for more than 64 MiB, and for a dataset of the hub of unknown size.
    """

    # The position in the data is a number of sequences: whatever determines the sequences and their
    # order must stay when a run resumes. Paths and columns may change where the tokens are the same.
    dataset: str | None = option(None, resume=Resume.SAME_CONTENT, is_path=True)
    mixture: dict[str, float] = option(factory=dict, resume=Resume.REFUSED)
    dataset_config: str | None = option(None, resume=Resume.SAME_CONTENT)
    split: str = option("train", resume=Resume.SAME_CONTENT)
    format: Literal["auto", "text", "messages", "prompt_completion", "instruction_output"] = option(
        "auto", resume=Resume.REFUSED
    )
    columns: dict[str, str] = option(factory=dict, resume=Resume.SAME_CONTENT)
    chat_template: str | None = option(None, resume=Resume.SAME_CONTENT, is_path=True)
    train_on_input: bool = option(False, resume=Resume.REFUSED)
    long_conversations: Literal["cut", "drop"] = option("cut", resume=Resume.REFUSED)
    end_of_text: int | str = option("auto", resume=Resume.SAME_CONTENT)
    # Labels are the next tokens, so a sequence of one token has no loss.
    seq_length: int = option(1024, resume=Resume.REFUSED, minimum=2, nemo=["encoder_seq_length"])
    packing: Literal["auto", "concatenate", "best_fit"] = option("auto", resume=Resume.REFUSED)
    isolate_documents: bool = option(True, resume=Resume.WHEN_ASKED)
    micro_batch_size: int = option(1, resume=Resume.REPORTED, minimum=1, nemo=["micro_batch_size"])
    global_batch_size: int = option(8, resume=Resume.WHEN_ASKED, minimum=1, nemo=["global_batch_size"])
    held_out_every: int | Literal["auto"] = option(
        "auto", resume=Resume.REFUSED, remedy=f"{WARM_START} (auto is 0 with data.eval_sequences 0)", minimum=0
    )
    validation_dataset: str | None = option(None, resume=Resume.SAME_CONTENT, is_path=True)
    eval_sequences: int = option(16, resume=Resume.REPORTED, minimum=0)
    on_bad_rows: Literal["error", "skip"] = option("error", resume=Resume.SAME_CONTENT)
    streaming: bool | Literal["auto"] = option("auto", resume=Resume.SAME_CONTENT)

    def __post_init__(self) -> None:
        check_options(self, "data")
        self._check_mixture()
        self._check_columns()
        self._check_format()
        if self.packing == "auto" and self.format != "auto":
            object.__setattr__(self, "packing", "best_fit" if self.has_conversations else "concatenate")
        if self.held_out_every == "auto":
            object.__setattr__(self, "held_out_every", HELD_OUT_EVERY if self.eval_sequences else 0)
        self._check_held_out()
        # Needed for every D. That B * D divides the global batch too is checked when D is known.
        require_divisible(
            "data.global_batch_size",
            self.global_batch_size,
            "data.micro_batch_size",
            self.micro_batch_size,
        )

    def accumulation_steps(self, replicas: int) -> int:
        """Return the micro-batches per optimizer step on each rank: global batch / (B * D).

        Raises:
            ValueError: the global batch size is not a multiple of B * D. A step without micro-batches would
                have a loss of 0.
        """
        # The divisor's name shows how it was computed: "... B x data-parallel size D = B * D".
        by = f"data.micro_batch_size {self.micro_batch_size} x data-parallel size {replicas} ="
        unit = self.micro_batch_size * replicas
        remedy = f"use a multiple of {unit} for data.global_batch_size, a smaller data.micro_batch_size, or fewer ranks"
        return require_divisible("data.global_batch_size", self.global_batch_size, by, unit, remedy)

    @property
    def has_conversations(self) -> bool:
        """Whether rows are conversations, not texts."""
        return self.format in CONVERSATIONS

    @property
    def split_every(self) -> int:
        """``held_out_every`` as a number."""
        assert self.held_out_every != "auto", "resolved when the options are checked"
        return self.held_out_every

    @property
    def sources(self) -> dict[str, float]:
        """Weights by dataset: ``mixture``, or ``dataset`` alone; empty if no data is named."""
        if self.dataset is not None:
            return {self.dataset: 1.0}
        return dict(self.mixture)

    @property
    def source(self) -> str:
        """``dataset``, of the options of one source."""
        assert self.dataset is not None, "require_sources and of_source come first"
        return self.dataset

    def require_sources(self) -> None:
        """Raise ``ValueError`` unless data is named; commands that read none do not call this."""
        if not self.sources:
            raise ValueError(
                "no data is named, and nothing is trained that was not: set data.dataset (a file, a directory, or a "
                "name on the Hugging Face hub; stdlib is the source of Python's standard library), or data.mixture"
            )

    def of_source(self, dataset: str) -> DataConfig:
        """Return the options of one of ``sources``, or of ``validation_dataset``."""
        split: dict[str, Any] = {}
        if self.validation_dataset is not None:
            # All of a source is trained then, and all of the validation text is held out.
            split = {"held_out_every": 0, "eval_sequences": 0}
        return replace(self, dataset=dataset, mixture={}, validation_dataset=None, **split)

    def _check_held_out(self) -> None:
        """Raise ``ValueError`` for an evaluation without text, or a validation text that nothing evaluates."""
        # With 1 every document would be held out.
        if self.split_every:
            require_at_least("data.held_out_every", self.split_every, 2)
        if self.validation_dataset is None:
            if not self.held_out_every and self.eval_sequences:
                raise ValueError(
                    f"data.held_out_every 0 leaves nothing for data.eval_sequences {self.eval_sequences}: set it to 0 "
                    "too, or name a data.validation_dataset"
                )
            return
        if self.validation_dataset in self.sources:
            raise ValueError(
                f"data.validation_dataset {self.validation_dataset!r} is the text that is trained: name another one, "
                "or leave it out"
            )
        if not self.eval_sequences:
            raise ValueError(
                f"data.validation_dataset {self.validation_dataset!r} is not read with data.eval_sequences 0: raise "
                "that, or leave validation_dataset out"
            )

    def _check_mixture(self) -> None:
        """Raise ``ValueError`` for a mixture without positive weights, or next to a dataset."""
        if self.mixture and self.dataset is not None:
            raise ValueError(
                f"data.dataset {self.dataset!r} and data.mixture {list(self.mixture)} are both given: write the "
                "dataset into the mixture, with its weight, or leave one of them out (--data.dataset null)"
            )
        for name, weight in self.mixture.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 < weight < math.inf:
                raise ValueError(
                    f"data.mixture gives {name!r} the weight {weight!r}: give it a positive number, or leave it out"
                )
        # 3 and 3.0 are one weight to a run that resumes.
        mixture = {expanded("data.mixture", name): float(weight) for name, weight in self.mixture.items()}
        object.__setattr__(self, "mixture", mixture)

    def _check_columns(self) -> None:
        """Raise ``ValueError`` for columns that are no names, or of fields that no format has together."""
        for field, column in self.columns.items():
            if not isinstance(column, str) or not column:
                raise ValueError(
                    f"data.columns gives {field!r} the column {column!r}: give it a name, in quotes if it looks like a "
                    "number, or leave it out"
                )
        formats = list(FIELDS) if self.format == "auto" else [self.format]
        known = {form: [name for part in FIELDS[form] for name in part] for form in formats}
        if not any(self.columns.keys() <= set(names) for names in known.values()):
            listed = "; ".join(f"{form} has {', '.join(names)}" for form, names in known.items())
            raise ValueError(
                f"data.columns names the fields {list(self.columns)}, and a format has others ({listed}): write "
                "{FIELD: COLUMN}"
            )
        if self.format != "auto":
            required, optional = columns_by_field(self.format, self.columns)
            read = [*required.values(), *optional.values()]
            for column in read:
                if read.count(column) > 1:
                    raise ValueError(f"data.columns {self.columns} reads the column {column!r} twice: name another one")

    def _check_format(self) -> None:
        """Raise ``ValueError`` for options that the format of the rows does not read."""
        if self.format == "auto":  # checked when the rows are known
            return
        if not self.has_conversations:
            for name, unset in (("chat_template", None), ("train_on_input", False), ("long_conversations", "cut")):
                if getattr(self, name) != unset:
                    raise ValueError(
                        f"data.{name} {getattr(self, name)!r} is for conversations, and data.format is 'text': set "
                        f"data.format to one of {', '.join(CONVERSATIONS)}, or leave data.{name} out"
                    )
            return
        if self.packing == "concatenate":
            raise ValueError(
                f"data.packing 'concatenate' would cut conversations (data.format {self.format!r}) where a sequence "
                "ends, and the next one would begin without the question: set it to best_fit, or leave it out"
            )
