"""Causal attention by tiles in plain PyTorch: no S x S matrix exists, in forward or in backward.

A compiler that sees the full graph may compute all tiles first and use them later, which needs
S x S memory again. Each tile therefore waits, at a barrier, for the results of the previous tile.
Eager devices have no barrier and need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.math_attention import scaled_scores
from nxd_memopt.planner.techniques.attention_tiles import tile_length

Span = tuple[int, int]
"""First position and number of positions of a tile."""


def refusal(call: AttentionCall) -> str | None:
    """Return why ``tiled_attention`` cannot run ``call``, or None if it can."""
    if call.dropout_p > 0:
        return f"tiled attention has no dropout, got {call.dropout_p}"
    return None


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    tile: int | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(scale Q K^t) V`` with a running softmax over tiles of keys.

    See arXiv:2112.05682 and arXiv:2205.14135. Saves query, key, value, output and one number per
    query; backward recomputes the scores of each tile. Keys and values are not repeated for their
    query heads. Sums run in fp32, or in float64 for float64.

    Args:
        query: ``[B, h, S, d]``.
        key: ``[B, g, S, d]``, g divides h.
        value: ``[B, g, S, d]``.
        mask: boolean ``[B, 1, S, S]``, True where a query may attend, with at least one True per
            row; or integers ``[B, S]``: a query sees the keys with its own number. Causality is
            added.
        tile: positions per tile; default ``tile_length(S)``.
        window: a query sees at most this many keys, its own included; None for all before it. Tiles
            before it are not computed.
        scale: factor of the scores; None for ``1 / sqrt(d)``.

    Returns:
        ``[B, h, S, d]``.
    """
    length = query.size(2)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    output: Any = _TiledAttention.apply(query, key, value, mask, tile or tile_length(length), window or length, scale)
    return output


class _TiledAttention(torch.autograd.Function):
    """Forward: ``O = softmax(S) V`` by tiles.

    Backward: recompute the tiles, ``P = exp(S - lse)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        tile: int,
        window: int,
        scale: float,
    ) -> Tensor:
        spans = _spans(query.size(2), tile)
        outputs: list[Tensor] = []
        log_sum_exps: list[Tensor] = []
        # each tile of queries waits for the results of the previous one, see the module's docstring
        previous: Sequence[Tensor] = ()
        for span in spans:
            previous = _attend(query, key, value, mask, span, spans, window, scale, after=previous)
            outputs.append(previous[0])
            log_sum_exps.append(previous[1])
        output = torch.cat(outputs, dim=2)
        log_sum_exp = torch.cat(log_sum_exps, dim=2)  # [B, h, S, 1]
        saved = [query, key, value, output, log_sum_exp]
        if mask is not None:
            saved.append(mask)
        ctx.save_for_backward(*saved)
        ctx.spans = spans
        ctx.window = window
        ctx.scale = scale
        return output

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Without the barrier, a compiler that sees both passes saves forward's tiles for backward.
        *saved, grad_output = backend.optimization_barrier([*ctx.saved_tensors, grad_output])
        grads = _backward(grad_output, *saved, spans=ctx.spans, window=ctx.window, scale=ctx.scale)
        return *grads, None, None, None, None


def _spans(length: int, tile: int) -> list[Span]:
    return [(start, min(tile, length - start)) for start in range(0, length, tile)]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows: Span,
    spans: Sequence[Span],
    window: int,
    scale: float,
    *,
    after: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the queries in ``rows``.

    Returns:
        ``[B, h, t, d]`` and ``[B, h, t, 1]``.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    # [B, g, r*t, d]
    tile, *_ = backend.optimization_barrier([_rows(query, rows, key.size(1)), *after])
    # Running softmax. Over the keys seen so far: m = max of the scores, l = sum of exp(s - m), and
    # o = sum of exp(s - m) v. A new tile with a larger maximum rescales l and o by
    # exp(m_old - m_new).
    maximum = tile.new_full((*tile.shape[:-1], 1), torch.finfo(wide).min, dtype=wide)
    total = torch.zeros_like(maximum)
    summed = torch.zeros_like(tile, dtype=wide)
    for cols in _visible(rows, spans, window):
        # the scores of this tile may exist only after those of the previous one are summed up
        tile, maximum, total, summed = backend.optimization_barrier([tile, maximum, total, summed])
        scores = _scores(tile, key.narrow(2, *cols), mask, rows, cols, window, scale)
        previous = maximum
        maximum = torch.maximum(previous, scores.amax(-1, keepdim=True))
        weights = (scores - maximum).exp()
        decay = (previous - maximum).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        summed = summed * decay + (weights.to(value.dtype) @ value.narrow(2, *cols)).to(wide)
    return _heads((summed / total).to(query.dtype), rows), _heads(maximum + total.log(), rows)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    mask: Tensor | None = None,
    *,
    spans: Sequence[Span],
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV by tiles.

    With ``P = exp(S - lse)`` and ``D = rowsum(dO O)``: dV = P^t dO, dS = scale P (dO V^t - D),
    dQ = dS K, dK = dS^t Q.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    dtype = query.dtype
    groups = key.size(1)
    dot = (grad.to(wide) * output).sum(-1, keepdim=True)  # [B, h, S, 1]
    # the tiles of query, grad, lse and dot for each range of queries
    row_tiles: dict[Span, tuple[Tensor, ...]] = {}
    for rows in spans:
        row_tiles[rows] = tuple(_rows(x, rows, groups) for x in (query, grad, log_sum_exp, dot))
    # dQ accumulates over the outer loop, so all its tiles stay in fp32: 2 x the bytes of a bf16 Q.
    # dK and dV of one tile are complete after the inner loop.
    dquery = {rows: torch.zeros_like(tiles[0], dtype=wide) for rows, tiles in row_tiles.items()}
    dkeys: list[Tensor] = []
    dvalues: list[Tensor] = []
    after: list[Tensor] = []
    for cols in spans:
        key_tile = key.narrow(2, *cols)
        value_tile = value.narrow(2, *cols)
        dkey = torch.zeros_like(key_tile, dtype=wide)
        dvalue = torch.zeros_like(value_tile, dtype=wide)
        for rows, (query_tile, grad_tile, lse_tile, dot_tile) in row_tiles.items():
            if cols not in _visible(rows, spans, window):
                continue
            query_tile, grad_tile, *_ = backend.optimization_barrier([query_tile, grad_tile, *after])
            # tensors of scores are [B, g, r*t, c], of one pair of tiles at a time
            weights = (_scores(query_tile, key_tile, mask, rows, cols, window, scale) - lse_tile).exp()
            dvalue += (weights.to(dtype).transpose(-1, -2) @ grad_tile).to(wide)
            dweights = (grad_tile @ value_tile.transpose(-1, -2)).to(wide)
            dscores = (weights * (dweights - dot_tile) * scale).to(dtype)
            dquery[rows] += (dscores @ key_tile).to(wide)
            dkey += (dscores.transpose(-1, -2) @ query_tile).to(wide)
            after = [dquery[rows], dkey, dvalue]
        dkeys.append(dkey.to(dtype))
        dvalues.append(dvalue.to(dtype))
    dqueries = [_heads(tile, rows).to(dtype) for rows, tile in dquery.items()]
    return torch.cat(dqueries, dim=2), torch.cat(dkeys, dim=2), torch.cat(dvalues, dim=2)


def _visible(rows: Span, spans: Sequence[Span], window: int) -> list[Span]:
    """Return the tiles of keys that some query of ``rows`` may see.

    Causality leaves the tiles that do not begin after the queries' tile, the window those that do
    not end before the first query's window.
    """
    return [cols for cols in spans if cols[0] <= rows[0] and cols[0] + cols[1] > rows[0] - window + 1]


def _rows(tensor: Tensor, rows: Span, groups: int) -> Tensor:
    """Reshape ``[B, h, S, n] -> [B, g, r*t, n]``, with the r query heads of a KV head as more rows.

    The KV head is therefore not repeated.
    """
    return tensor.unflatten(1, (groups, -1)).narrow(3, *rows).flatten(2, 3)


def _heads(tensor: Tensor, rows: Span) -> Tensor:
    """Reshape ``[B, g, r*t, n] -> [B, h, t, n]``."""
    return tensor.unflatten(2, (-1, rows[1])).flatten(1, 2)


def _scores(
    query_tile: Tensor,
    key_tile: Tensor,
    mask: Tensor | None,
    rows: Span,
    cols: Span,
    window: int,
    scale: float,
) -> Tensor:
    """Return the scores ``[B, g, r*t, c]``, in fp32 or float64.

    Scores of hidden keys are the dtype's least number.
    """
    wide = torch.promote_types(query_tile.dtype, torch.float32)
    scores = scaled_scores(query_tile, key_tile, wide, scale)
    hidden = _hidden(mask, rows, cols, window, scores.device)
    if hidden is None:
        return scores
    scores = scores.unflatten(2, (-1, rows[1]))  # [B, g, r, t, c]
    # The least number, not -inf: while all keys of a row are hidden, exp(s - m) is 1 and the row's
    # sum stays above 0. The first visible key rescales that sum by exp(m_old - m_new) = 0.
    return scores.masked_fill(hidden, torch.finfo(wide).min).flatten(2, 3)


def _hidden(mask: Tensor | None, rows: Span, cols: Span, window: int, device: torch.device) -> Tensor | None:
    """Return a mask that is True where a query may not look, or None if it may look everywhere.

    The mask is ``[t, c]`` for causality and window alone, and ``[B, 1, 1, t, c]`` with ``mask``.
    """
    hidden = None
    if rows == cols:  # the only tile that the diagonal crosses
        hidden = torch.ones(rows[1], cols[1], dtype=torch.bool, device=device).triu(1)
    # Query rows[0] + i sees key cols[0] + j from i - j = cols[0] - rows[0] + window on no longer. The
    # last query and the first key are farthest apart.
    first_hidden = cols[0] - rows[0] + window
    if rows[1] - 1 >= first_hidden:
        before = torch.ones(rows[1], cols[1], dtype=torch.bool, device=device).tril(-first_hidden)
        hidden = before if hidden is None else hidden | before
    if mask is None:
        return hidden
    if mask.dim() == 2:
        # documents: [B, t, 1] != [B, 1, c] for this pair of tiles only, never [B, S, S]
        query_ids = mask.narrow(1, *rows)[:, :, None]
        key_ids = mask.narrow(1, *cols)[:, None, :]
        masked = (query_ids != key_ids)[:, None, None]
    else:
        masked = ~mask.narrow(2, *rows).narrow(3, *cols).unsqueeze(2)
    if hidden is None:
        return masked
    return masked | hidden
