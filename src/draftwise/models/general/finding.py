"""Which modules of a model carry a state from token to token, found by what they do in a pass over a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.models.general.carried import (
    ArgumentUnit,
    AttributeUnit,
    CacheUnit,
    StateView,
    Unit,
    first_rows,
    has_rows,
    map_rows,
    rows_shape,
    running,
)
from draftwise.models.general.hoisting import EndsUse

_CACHES = ("cache_params", "past_key_values")
"""The names of the cache argument in Transformers' modules."""
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Finder:
    """A `carried.Runner` that notes which modules keep states, and what they were called with."""

    def __init__(self) -> None:
        self.found: dict[Unit, _Arguments] = {}

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        touched, answer = _watched(unit, args, kwargs)
        if touched:
            parts = set(unit.module.modules())  # they are not computed by themselves
            self.found = {one: given for one, given in self.found.items() if one.module not in parts}
            self.found[unit] = args, kwargs
            if not isinstance(answer, Tensor):
                shape = rows_shape(args, kwargs)
                rows = [i for i, x in enumerate(answer) if isinstance(x, Tensor) and x.shape[:2] == shape]
                unit.answers = tuple(rows), len(answer)
        return answer


def _watched(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Whether the module keeps a state, and what it answers."""
    if isinstance(unit, AttributeUnit):
        before = unit.kept()
        answer = unit.told(args, kwargs, True)
        after = unit.kept().items()
        unit.keys = tuple(key for key, x in after if isinstance(x, Tensor) and before.get(key) is not x)
        return bool(unit.keys), answer
    if isinstance(unit, CacheUnit):
        view = StateView()
        answer = unit.told(args, kwargs, view)
        return view.touched, answer
    assert isinstance(unit, ArgumentUnit)
    unit.ignored = frozenset({unit.place, unit.name})
    given = unit.given(args, kwargs)
    initial = tuple(tensor.clone() for tensor in given or ())
    answer = unit.forward(*args, **kwargs)
    states = answer[1] if isinstance(answer, tuple) and len(answer) > 1 else None
    if not isinstance(states, (tuple, list)) or not all(isinstance(state, Tensor) for state in states):
        return False, answer
    if initial:  # of all layers: its own is the one that it changed
        changed = (states[0] != initial[0]).flatten(0, -2).any(0).nonzero().flatten().tolist()
        if len(changed) != 1:
            return False, answer
        unit.initial, unit.layer = initial, changed[0]
    return True, answer


class Afresh:
    """Computes the modules with a state from none, and forgets it: a `carried.Runner` for a pass by itself."""

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return unit.start(args, kwargs, None)[0]


def find_units(model: nn.Module, run: Callable[[], object], *, values: bool = True) -> list[Unit]:
    """The modules that carry a state, in the order in which they are called, ready for a `carried.Runner`.

    Args:
        run: a pass of the model over a few tokens of one sequence.
        values: whether tensors have any; else nothing but the shapes of states is found out.

    Raises:
        ModelLoadError: a module is called with something that has no row per token.
    """
    candidates = [unit for module in model.modules() if (unit := _candidate(module)) is not None]
    finder = _Finder()
    try:
        for unit in candidates:
            unit.module.forward = unit
        with running(finder):
            run()
    finally:
        for unit in candidates:
            if unit not in finder.found:
                del unit.module.forward
    first = 0
    for unit, (args, kwargs) in finder.found.items():
        if values:
            args, kwargs = _without_masks(unit, args, kwargs)
        use = EndsUse(unit.module)
        answer, states = unit.start(args, kwargs, None)
        unit.ends = use.ends(
            first_rows(args, kwargs), answer if unit.answers is None else answer[unit.answers[0][0]]
        )
        unit.tensors = tuple((tuple(state.shape[1:]), state.dtype) for state in states)
        unit.first = first
        first += len(states)
        if values:
            _try(unit, args, kwargs)
    return list(finder.found)


def _candidate(module: nn.Module) -> Unit | None:
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        return None
    names = list(signature(module.forward).parameters)
    cache = next((name for name in _CACHES if name in names), None)
    if cache is not None:
        return CacheUnit(module, module.forward, names.index(cache), cache)
    if "state" in names:
        return ArgumentUnit(module, module.forward, names.index("state"), "state")
    if "use_cache" in names:
        return AttributeUnit(module, module.forward, names.index("use_cache"), "use_cache")
    return None


def _without_masks(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Arguments without the tensors that have no rows, if the module does not look at them; notes which they are."""
    own, shape = unit.ignored, rows_shape(args, kwargs)
    args, kwargs = unit.needed(args, kwargs)
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    odd: list[int | str] = [name for name, x in named if isinstance(x, Tensor) and not has_rows(x, shape)]
    if not odd:
        return args, kwargs
    wanted = unit.call(args, kwargs, None)
    unit.ignored = own | frozenset(odd)
    try:
        found = unit.call(*unit.needed(args, kwargs), None)
    except Exception:  # whatever a module's code raises: it needs them
        found = None
    if found is None or not all(
        torch.equal(a, b) for a, b in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True)
    ):
        unit.ignored = own  # they will be refused
    return unit.needed(args, kwargs)


def _try(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Find out what the module can do in one call: several tokens behind a state, and tokens of several requests. Both
    have to be as good as one call per token and request."""
    shape = rows_shape(args, kwargs)
    half = shape[1] // 2

    def part(rows: list[list[int]], states: list[Tensor] | None) -> _Computed:
        own: _Arguments = map_rows((args, kwargs), shape, lambda x: x[torch.tensor(rows, device=x.device)])
        return unit.call(*own, states and [state.clone() for state in states])

    def singly(first: int, count: int, states: list[Tensor] | None) -> _Computed:
        answers = []
        for i in range(first, first + count):
            answer, states = part([[i]], states)
            answers.append(answer)
        assert states is not None
        return [torch.cat(parts, 1) for parts in zip(*answers, strict=True)], states

    chance = torch.Generator().manual_seed(0)
    begun = [
        [_stirred(state, chance) for state in part([[*range(start, start + half)]], None)[1]]
        for start in (0, half)
    ]
    one, other = singly(2, 1, begun[0]), singly(5, 1, begun[1])
    unit.chunks = _same(lambda: part([[*range(half, half + 4)]], begun[0]), lambda: singly(half, 4, begun[0]))
    unit.batches = _same(
        lambda: part([[2], [5]], [torch.cat(pair) for pair in zip(*begun, strict=True)]),
        lambda: (
            [torch.cat(pair) for pair in zip(one[0], other[0], strict=True)],
            [torch.cat(pair) for pair in zip(one[1], other[1], strict=True)],
        ),
    )


def _stirred(state: Tensor, chance: torch.Generator) -> Tensor:
    """A state of more weight than that of a few tokens: who does not look at it answers something else."""
    if not state.is_floating_point():
        return state
    noise = torch.randn(state.shape, generator=chance).to(state.device)
    scale = state.float().abs().mean().clamp(min=1e-2)
    return (state.float() + 4.0 * scale * noise).to(state.dtype)


_Computed = tuple[list[Tensor], list[Tensor]]


def _same(attempt: Callable[[], _Computed], safe: Callable[[], _Computed]) -> bool:
    wanted = safe()
    try:
        found = attempt()
    except Exception:  # whatever a module's code raises: it was not made for this
        return False
    # States may be of a wider dtype than what they are made of.
    limit = 1e-4 if wanted[0][0].dtype is torch.float32 else 3e-2
    pairs = zip(found[0] + found[1], wanted[0] + wanted[1], strict=True)
    return all(a.shape == b.shape and _distance(a, b) <= limit for a, b in pairs)


def _distance(a: Tensor, b: Tensor) -> float:
    """Mean difference in mean magnitudes. Who passes over a state makes tenths."""
    scale = float(b.float().abs().mean())
    return float((a.float() - b.float()).abs().mean()) / max(scale, 1e-6)
