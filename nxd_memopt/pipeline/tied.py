"""Gradients of a weight that the first and the last stage of a pipeline share: an embedding with a tied head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.grads import average_gradients
from nxd_memopt.parallel_layers.summed_gradients import gradient_of


def sum_tied_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum the gradients of tied weights over their stages, in place, once per optimizer step. Every rank calls.

    Tied weights have the attribute ``shared``: False on the first stage with the weight, True on later ones. The
    order with respect to averages over data-parallel ranks does not matter: both are linear.
    """
    tied = [parameter for parameter in parameters if hasattr(parameter, "shared")]
    # Creating groups is collective: ranks of the stages in between call too.
    group = parallel_state.get_tied_stages_group()
    if tied:
        average_gradients([cast(Tensor, gradient_of(parameter)) for parameter in tied], group, divisor=1)
