"""Finds in a trace how rows of a mixture choose their experts.

Routers are written in many ways: the softmax before the choice or behind it, a correction here and a mask of groups
there. What counts is which experts a row gets from its scores, and with what weights. Those are numbers of the trace,
beside the scores, so that each form that our kernels know (`Routing`) is tried on them. Nothing is asked of names.

Worked example: scores (2, 0, 1, 0) and what the model made of them, experts (0, 2) with weights (0.73, 0.27). The
softmax over all gives (0.61, 0.22), whose sum is 0.83: normalised, they are the weights. Sigmoids: (0.55, 0.45).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftwise.kernels.mixture import judged_shares
from draftwise.kernels.routing import Routing
from draftwise.models.general.experts import Stack
from draftwise.models.general.nodes import CannotAssemble, Linear, Mixture, Node, Scale, Unary
from draftwise.models.general.rows import Rows, Unknown, Value

_TIE = 1e-6  # shares that differ by less may be chosen in any order
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.004}  # of a weight
_SAME = 1e-6  # what is off by less than this more is no worse
_MOST_GROUPS = 64


class Follower(Protocol):
    """A trace's knowledge about tensors."""

    paused: bool
    numbers: Mapping[Linear, Tensor]

    def held(self, tensor: Tensor) -> Value | None: ...

    def node_of(self, tensor: Tensor) -> Node: ...

    def put_node(self, tensor: Tensor, node: Node, rows_at: int) -> None: ...

    def put_unknown(self, tensor: Tensor, why: str) -> None: ...


@contextmanager
def following(stacks: Mapping[nn.Module, Stack], tracer: Follower) -> Iterator[None]:
    """Calls of these modules become nodes; what is inside is not looked at."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracer.paused = True

    def behind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        tracer.paused = False
        names = stacks[module].names
        x, chosen, weights = (*args, *(kwargs[name] for name in names[len(args) :]))
        try:
            node = _mixture(stacks[module], tracer, x, chosen, weights)
            tracer.put_node(out, node, out.ndim - 2)
        except CannotAssemble as error:
            tracer.put_unknown(out, str(error))

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in stacks]
    hooks += [module.register_forward_hook(behind, with_kwargs=True) for module in stacks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mixture(stack: Stack, tracer: Follower, x: Tensor, chosen: Tensor, weights: Tensor) -> Mixture:
    """
    Raises:
        CannotAssemble: the experts are chosen in a way that our kernels do not know.
    """
    rows = tracer.node_of(x)
    values = [tracer.held(each) for each in (chosen, weights)]
    scores = _scores(values, stack.count)
    if scores not in tracer.numbers:
        raise CannotAssemble("scores of experts are not a linear layer by themselves")
    constants = [c for value in values if isinstance(value, Unknown) for c in value.constants]
    found = routing_of(tracer.numbers[scores], chosen, weights, constants)
    if found is None:
        raise CannotAssemble("it chooses experts in a way that is not known")
    return Mixture(rows.width, rows, scores, stack, *found)


def _scores(values: Sequence[Value | None], count: int) -> Linear:
    """The linear layer of ``count`` results that all of these depend on, and on nothing else."""
    stack: list[Node] = []
    for value in values:
        if isinstance(value, Unknown):
            stack += value.of
        elif isinstance(value, Rows):
            stack.append(value.node)
    found: set[Linear] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, Linear):
            found.add(node)
        elif isinstance(node, Unary | Scale):
            stack.append(node.x)
        else:
            raise CannotAssemble("experts are chosen by more than their scores")
    if len(found) != 1 or next(iter(found)).width != count:
        raise CannotAssemble("experts are chosen by something else than one linear layer")
    return found.pop()


def routing_of(
    scores: Tensor, chosen: Tensor, weights: Tensor, constants: Sequence[Tensor | float] = ()
) -> tuple[Routing, Tensor | None] | None:
    """The routing that gives rows these experts and weights, and its correction.

    Args:
        scores: [T, E] float32.
        chosen: [T, K] integers, in any order.
        weights: [T, K], of any floats.
        constants: that may be corrections [E], or factors of all weights.

    Returns:
        None: none that is known.
    """
    count, top_k = scores.shape[1], chosen.shape[1]
    chosen, wanted = chosen.long().cpu(), weights.detach().float().cpu()
    tolerance = _TOLERANCE.get(weights.dtype, 1e-4)
    corrections: list[Tensor | None] = [
        c.detach().float().cpu().flatten() for c in constants if isinstance(c, Tensor) and c.numel() == count
    ]
    numbers = [float(c) for c in constants if not isinstance(c, Tensor) or c.numel() == 1]
    best: tuple[float, Routing, Tensor | None] | None = None
    for correction in (*corrections, None):
        for groups in _groups(count, top_k):
            for scoring in ("softmax", "sigmoid"):
                routing = Routing(count, top_k, scoring, False, 1.0, *groups)
                shares, judged = judged_shares(scores, routing, correction)
                least = judged.topk(top_k).values[:, -1:]
                if bool((judged.gather(1, chosen) < least - _TIE).any()):
                    continue
                own = shares.gather(1, chosen)
                for normalise in (True, False):
                    base = own / (own.sum(-1, keepdim=True) + 1e-20) if normalise else own
                    scale, off = _factor(base, wanted, numbers)
                    if off <= tolerance and (best is None or off < best[0] - _SAME):
                        best = off, replace(routing, normalise=normalise, scale=scale), correction
    return None if best is None or bool((scores == scores[0, 0]).all()) else best[1:]


def _factor(base: Tensor, wanted: Tensor, numbers: Sequence[float]) -> tuple[float, float]:
    """The factor of all of ``base``, and the relative error of the products. A factor that a model
    wrote down is more exact than one that is measured."""
    measured = float((base * wanted).sum() / (base * base).sum().clamp(min=1e-30))

    def off(factor: float) -> float:
        return float(((base * factor - wanted).abs() / wanted.abs().clamp(min=1e-6)).max())

    known = [(factor, off(factor)) for factor in (1.0, *numbers)]
    best = min(known, key=lambda pair: pair[1])
    return best if best[1] <= 2 * off(measured) + _SAME else (measured, off(measured))


def _groups(count: int, top_k: int) -> Iterator[tuple[int, int, int]]:
    """Ways to choose groups first: how many there are, how many are taken, and how many experts judge one."""
    yield 1, 1, 1
    for groups in range(2, min(count, _MOST_GROUPS) + 1):
        size = count // groups
        if count % groups:
            continue
        for top_groups in range(-(-top_k // size), groups):
            for rank in (2, 1) if size > 1 else (1,):
                yield groups, top_groups, rank
