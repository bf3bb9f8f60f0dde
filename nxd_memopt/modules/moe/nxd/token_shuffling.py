"""Exchange of random tokens between data-parallel ranks, which makes them less correlated (arXiv:2103.16716)."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.config import require_divisible
from nxd_memopt.parallel_layers import mappings, parallel_state


def token_shuffle(hidden_states: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Permute this rank's tokens, and send an equal share of them to each rank of the token-shuffle group.

    Args:
        hidden_states: ``[a, b, H]``; the group's size divides a * b.
        seed: of the permutation, without effect on other random numbers. Default the device's stream,
            which tensor-parallel ranks share.

    Returns:
        Tokens of all ranks of the group, ``[a, b, H]``, and the permutation ``[a * b]``.

    Raises:
        ValueError: the tokens cannot be divided equally.
    """
    tokens = hidden_states.reshape(-1, hidden_states.size(-1))
    size = parallel_state.get_token_shuffle_group_size()
    require_divisible("number of tokens", tokens.size(0), "token_shuffle_group_size", size)
    generator = None
    if seed is not None:
        generator = torch.Generator(tokens.device).manual_seed(seed)
    permutation = torch.rand(tokens.size(0), device=tokens.device, generator=generator).argsort()
    return _exchange(tokens.index_select(0, permutation)).view(hidden_states.shape), permutation


def token_unshuffle(permuted_states: Tensor, permutation: Tensor) -> Tensor:
    """Undo ``token_shuffle``: return what became of this rank's tokens, in their order."""
    tokens = _exchange(permuted_states.reshape(-1, permuted_states.size(-1)))
    return tokens.index_select(0, permutation.argsort()).view(permuted_states.shape)


def _exchange(tokens: Tensor) -> Tensor:
    """Send the j-th of equal ranges of rows to the j-th rank of the group; its own inverse."""
    if parallel_state.get_token_shuffle_group_size() == 1:
        return tokens
    return mappings.all_to_all_in_expert_parallel_region(tokens, parallel_state.get_token_shuffle_group())
