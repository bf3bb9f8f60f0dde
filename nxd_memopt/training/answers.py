"""Answers that the model generates to questions of held-out conversations, before and after training."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nxd_memopt.backends import backend
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import from_rank_zero
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.packing import DOCUMENT_START, ID_MASK, NOT_TRAINED, PADDING, Tokens
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.evaluation import held_out_rows
from nxd_memopt.training.reporting.reporter import Reporter
from nxd_memopt.training.state import Training

# Each token is a forward of all prompts, without a cache of keys and values: with the defaults of the options about as
# much work as a training step. Short prompts keep it there.
PROMPTS = 3
PROMPT_TOKENS = 256
NEW_TOKENS = 64
LIMIT_S = 60.0  # a forward of weights that are gathered or copied from the host may take seconds
LENGTH_MULTIPLE = 16
"""Forwards have lengths of this multiple times T, so that few shapes occur."""


@dataclass(frozen=True)
class Answers:
    """Generated tokens.

    Args:
        tokens: of each prompt; without the token that ended it.
        ended: for each prompt, whether such a token was generated.
        seconds: time that they took.
    """

    tokens: list[list[int]]
    ended: list[bool]
    seconds: float


class SampledAnswers:
    """Answers to the same questions before and after training. Every rank makes the same calls.

    Greedy generation with the model under training draws no random numbers and changes nothing of it.

    Args:
        training: the run; its held-out conversations have the questions.
        config: options of the run.
        vocabulary: tokenizer, and the tokens that end an answer.
        reporter: records and shows the answers.
    """

    def __init__(self, training: Training, config: TrainConfig, vocabulary: Vocabulary, reporter: Reporter) -> None:
        self._training = training
        self._vocabulary = vocabulary
        self._reporter = reporter
        self._prompts: list[list[int]] = []
        if not config.data.has_conversations or not config.data.eval_sequences:
            return
        refusal = _refusal(config)
        if refusal is None:
            rows = held_out_rows(training, config)
            self._prompts = [] if rows is None else prompts_of(rows, _longest(training.model))
            if not self._prompts:
                refusal = f"no held-out conversation begins with a question of at most {PROMPT_TOKENS} tokens"
        if refusal is not None:
            reporter.say(f"answers: none are generated: {refusal}")

    def before_training(self) -> None:
        """Generate and record answers of a run at step 0; a resumed run has them in its records."""
        if self._prompts and self._training.step == 0:
            self._generate()

    def after_training(self) -> None:
        """Generate and record answers, and show them next to the recorded ones of step 0."""
        if not self._prompts:
            return
        seconds = self._generate()
        self._reporter.show_answers(self._training.step, [self._text(prompt) for prompt in self._prompts], seconds)

    def _generate(self) -> float:
        """Record an answer to each prompt; return the time in seconds."""
        special = self._vocabulary.special
        assert special is not None
        penalty = (special.generation or {}).get("repetition_penalty") or 1.0
        answers = greedy_answers(self._training.model, self._prompts, special.ends_of_answers(), penalty=penalty)
        for prompt, tokens, ended in zip(self._prompts, answers.tokens, answers.ended, strict=True):
            text = self._vocabulary.tokenizer.decode(tokens, skip_special_tokens=True)
            row = {"prompt": self._text(prompt), "answer": text, "tokens": len(tokens), "ended": ended}
            self._reporter.answer(self._training.step, row)
        return answers.seconds

    def _text(self, prompt: Sequence[int]) -> str:
        return self._vocabulary.tokenizer.decode(prompt, skip_special_tokens=False)


def prompts_of(rows: Tokens, longest: int) -> list[list[int]]:
    """Return the first different questions of the conversations in ``rows [n, S]``, at most ``PROMPTS``.

    A question is everything before the first token that is trained, rendered and tokenized as in training.

    Args:
        rows: packed conversations with the flags of ``packing``; none is cut at its beginning.
        longest: tokens that a question and its answer may have together.
    """
    found: dict[tuple[int, ...], None] = {}
    for row in rows:
        starts = np.flatnonzero(row & DOCUMENT_START)
        for start, end in zip(starts, [*starts[1:], len(row)], strict=True):
            trained = np.flatnonzero((row[start:end] & NOT_TRAINED) == 0)
            # Without a trained token it is padding; a first token that is trained leaves no question.
            if not len(trained) or row[start] & PADDING:
                continue
            if 0 < trained[0] <= min(PROMPT_TOKENS, longest - 1):
                found[tuple((row[start : start + trained[0]] & ID_MASK).tolist())] = None
            if len(found) == PROMPTS:
                return [list(prompt) for prompt in found]
    return [list(prompt) for prompt in found]


@torch.no_grad()
def greedy_answers(
    model: Any, prompts: Sequence[Sequence[int]], ends: Collection[int], *, penalty: float = 1.0
) -> Answers:
    """Return the most probable tokens after each prompt, at most ``NEW_TOKENS``. Every rank calls.

    Every token is the result of a full forward of all prompts, padded on the right: with causal attention no token
    sees the padding. Under all kinds of sharding the ranks run the same forwards.

    Args:
        model: ``ParallelCausalLM``, which is left in evaluation mode.
        prompts: token ids.
        ends: tokens that end an answer.
        penalty: ``repetition_penalty`` of the model's ``generation_config.json``.
    """
    model.eval()
    multiple = LENGTH_MULTIPLE * parallel_state.get_tensor_model_parallel_size()
    longest = _longest(model)
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    started = time.perf_counter()
    for _ in range(NEW_TOKENS):
        length = -(-max(map(len, texts)) // multiple) * multiple
        # Any token: it is not seen.
        ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
        logits = model(ids.to(backend.device)).logits  # [n, length, V]
        last = torch.tensor([len(text) - 1 for text in texts], device=logits.device)
        scores = logits[torch.arange(len(texts), device=logits.device), last].float()  # [n, V]
        chosen = penalized(scores, texts, penalty).argmax(dim=-1).tolist()
        for index, token in enumerate(chosen):
            if len(texts[index]) < longest and not ended[index]:
                ended[index] = token in ends
                texts[index] += [] if ended[index] else [token]
        is_done = all(end or len(text) == longest for end, text in zip(ended, texts, strict=True))
        is_late = time.perf_counter() - started > LIMIT_S
        # Rank 0's answer: replicas may round differently, and clocks differ. A rank that stopped alone would leave the
        # others in a collective.
        if from_rank_zero(is_done or is_late):
            break
    tokens = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    return Answers(tokens, ended, time.perf_counter() - started)


def penalized(scores: torch.Tensor, texts: Sequence[Sequence[int]], penalty: float) -> torch.Tensor:
    """Return scores ``[n, V]`` with lower ones for the tokens of each text, as transformers computes them."""
    scores = scores.clone()
    for row, text in zip(scores, texts, strict=True):
        seen = torch.tensor(sorted(set(text)), device=scores.device)
        row[seen] = torch.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    return scores


def _longest(model: Any) -> int:
    """Return how many tokens a text may have, a multiple of what the lengths of forwards are multiples of."""
    # Some types of RoPE have other frequencies for longer texts: with padding beyond that bound a text within it would
    # have them too.
    assert isinstance(model, ParallelCausalLM)
    multiple = LENGTH_MULTIPLE * parallel_state.get_tensor_model_parallel_size()
    limit = model.config.max_position_embeddings
    if model.rope.longest is not None:
        limit = min(limit, model.rope.longest)
    return limit // multiple * multiple


def _refusal(config: TrainConfig) -> str | None:
    """Return why a run on conversations generates no answers, or None."""
    if config.parallel.pipeline_model_parallel_size > 1:
        return "no rank of a pipeline has the complete model (parallel.pipeline_model_parallel_size)"
    if backend.shapes_are_static:
        return "the device would compile a graph for each length"
    if config.trainer.compile:
        return "other lengths would compile the layers again, and training then runs other kernels (trainer.compile)"
    if config.data.train_on_input:
        return "with data.train_on_input the tokens do not say where an answer begins"
    if config.moe.moe_expert_capacity_factor is not None:
        return "experts that drop tokens would drop others than in the export (moe_expert_capacity_factor)"
    return None
