"""Gradients of a weight that the first and the last stage of a pipeline share: an embedding with a tied head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.grads import average_gradients
from nxd_memopt.parallel_layers.summed_gradients import gradient_of


def sum_tied_gradients(parameters: Iterable[Tensor], gradients: Sequence[Tensor | None] | None = None) -> None:
    """Sum the gradients of tied weights over their stages, in place, once per optimizer step. Every rank calls.

    Call it after averages over data-parallel ranks: the copies of a weight are then updated by equal gradients.

    Args:
        parameters: of this rank. Tied weights have the attribute ``shared``: False on the first stage with the weight,
            True on later ones.
        gradients: of each parameter; default ``gradient_of``.
    """
    parameters = list(parameters)
    if gradients is None:
        gradients = [gradient_of(parameter) for parameter in parameters]
    pairs = zip(parameters, gradients, strict=True)
    tied = [gradient for parameter, gradient in pairs if hasattr(parameter, "shared") and gradient is not None]
    # Creating groups is collective: ranks of the stages in between call too.
    group = parallel_state.get_tied_stages_group()
    if tied:
        average_gradients(tied, group, divisor=1)
