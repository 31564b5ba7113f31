"""Modules of a Transformers model that carry a state from token to token, found by what they do with their cache.

In a pass a model computes the rows of all requests as one sequence. For what has no state, and for attention, which is
taken by `attention.Paged`, that is right. A module with a state is instead called once per request, or once for one
token of each of many requests, with a cache of its own that holds that state and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftwise.errors import ModelLoadError

CACHES = ("cache_params", "past_key_values")
"""What Transformers' modules call the cache that they are given."""

StateKey = tuple[str, int]
"""Kind of a state, and which of that kind in a module."""


class StateView:
    """Stands for Transformers' cache in one call of one module: it gives the states that it was made of, and takes new
    ones. Some modules write into what they were given, so it has to be the caller's own.

    ``layer_idx`` is not looked at: a view is for one module.
    """

    def __init__(self, states: Mapping[StateKey, Tensor] | None = None) -> None:
        """``states``: [B, ...] each, behind the tokens before; None: there are none."""
        self.states: dict[StateKey, Tensor] = dict(states or {})
        self._before = states is not None
        self.touched = False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get("recurrent", state_idx)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._get("linear", 0)

    def _get(self, kind: str, index: int) -> Tensor | None:
        self.touched = True
        return self.states.get((kind, index)) if self._before else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Take the inputs of a convolution, [B, C, n]: its state is the last ``conv_kernel_size`` of all there were.

        Returns:
            The state before and these inputs behind it, [B, C, more]. Before a first token stand zeros, if the inputs
            are fewer than the kernel.
        """
        self.touched = True
        key = ("conv", state_idx)
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if self._before:
            width = self.states[key].shape[-1]
            seen = torch.cat([self.states[key], conv_states], -1)
        else:
            seen = pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        self.states[key] = seen[..., seen.shape[-1] - width :]
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.touched = True
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.touched = True
        self.states["linear", 0] = linear_cache

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._before

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # Of a cache of keys and values that is empty: attention asks it while states are looked for.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class Runner(Protocol):
    """Who computes the modules with a state, in a pass."""

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module answers for all rows of the pass."""


_runner: ContextVar[Runner | None] = ContextVar("draftwise_recurrence", default=None)


@contextmanager
def running(runner: Runner | None) -> Iterator[None]:
    """Modules with a state are computed by ``runner`` meanwhile; None: by themselves, from no state."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


@dataclass(eq=False)
class Unit:
    """One module with a state.

    ``keys``: of its states, ``tensors``: shape and dtype of each, of one request. ``chunks``: whether several tokens
    can follow a state in one call; else they come one by one. ``first``: which of the model's state tensors are its
    own: ``first``, ``first + 1``, ... ``answers``: which items of the tuple that it answers have a row per token, of
    how many items; None: it answers with one tensor. Items without rows are left out.
    """

    module: nn.Module
    forward: Callable[..., Any]
    cache: str  # name of the parameter
    place: int  # its place among those without names
    keys: tuple[StateKey, ...] = ()
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    chunks: bool = False
    first: int = 0
    answers: tuple[tuple[int, ...], int] | None = None

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute n tokens of B requests from their ``states`` [B, ...] each, which are overwritten; None: from none.

        Returns:
            What the module answers, tensors [B, n, ...], and the states behind these tokens.
        """
        view = StateView(None if states is None else dict(zip(self.keys, states, strict=True)))
        answer = self.ask(args, kwargs, view)
        rows = [answer] if self.answers is None else [answer[i] for i in self.answers[0]]
        return rows, [view.states[key] for key in self.keys]

    def answer(self, rows: Sequence[Tensor]) -> Any:
        """The tensors of `call` as the module answers with them."""
        if self.answers is None:
            return rows[0]
        places, count = self.answers
        items: list[Tensor | None] = [None] * count
        for place, x in zip(places, rows, strict=True):
            items[place] = x
        return tuple(items)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any], view: StateView) -> Any:
        if self.place < len(args):
            args = (*args[: self.place], view, *args[self.place + 1 :])
        else:
            kwargs = {**kwargs, self.cache: view}
        return self.forward(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = _runner.get()
        return self.forward(*args, **kwargs) if runner is None else runner.run(self, args, kwargs)


class _Finder:
    """Notes which modules ask a cache for states, and what they were called with."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], StateView]] = {}

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view = StateView()
        answer = unit.ask(args, kwargs, view)
        if view.touched:
            self.found[unit.module] = args, kwargs, view
            if not isinstance(answer, Tensor):
                shape = (1, count_rows(args, kwargs))
                rows = [i for i, x in enumerate(answer) if isinstance(x, Tensor) and x.shape[:2] == shape]
                unit.answers = tuple(rows), len(answer)
        return answer


def find_units(model: nn.Module, run: Callable[[], object]) -> list[Unit]:
    """The modules that carry a state, in the order in which they are called, ready to be computed by a `Runner`.

    Args:
        run: a pass of the model over a few tokens, of which there are no whole number of tens.

    Raises:
        ModelLoadError: a module changes states in a way that is not understood.
    """
    from transformers import PreTrainedModel

    candidates: list[Unit] = []
    for module in model.modules():
        names = list(signature(module.forward).parameters)
        cache = next((name for name in CACHES if name in names), None)
        if cache is not None and not isinstance(module, PreTrainedModel):
            candidates.append(Unit(module, module.forward, cache, names.index(cache)))
            module.forward = candidates[-1]
    finder = _Finder()
    try:
        with running(finder):
            run()
    finally:
        for unit in candidates:
            if unit.module not in finder.found:
                del unit.module.forward
    by_module = {unit.module: unit for unit in candidates}
    units = [by_module[module] for module in finder.found]
    first = 0
    for unit in units:
        args, kwargs, view = finder.found[unit.module]
        unit.keys = tuple(sorted(view.states))
        unit.tensors = tuple((tuple(view.states[key].shape[1:]), view.states[key].dtype) for key in unit.keys)
        unit.first = first
        first += len(unit.keys)
        unit.chunks = _goes_on(unit, args, kwargs)
    return units


def _goes_on(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of several tokens behind a state is as good as one call per token."""
    total = count_rows(args, kwargs)
    half = total // 2

    def part(start: int, end: int, states: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
        own_args, own_kwargs = rows_of((args, kwargs), total, start, end)
        return unit.call(own_args, own_kwargs, states and [state.clone() for state in states])

    _, states = part(0, half, None)
    try:
        together, after = part(half, total, states)
    except Exception:  # whatever a module's code raises: it was not made for this
        return False
    singly = []
    for i in range(half, total):
        answer, states = part(i, i + 1, states)
        singly.append(answer)
    wanted = [torch.cat(parts, 1) for parts in zip(*singly, strict=True)]
    pairs = [*zip(together, wanted, strict=True), *zip(after, states, strict=True)]
    return all(a.shape == b.shape and _near(a, b) for a, b in pairs)


def _near(a: Tensor, b: Tensor) -> bool:
    limit = 1e-4 if b.dtype is torch.float32 else 3e-2
    scale = float(b.float().abs().mean())
    return float((a.float() - b.float()).abs().mean()) <= limit * max(scale, 1e-6)


# ---------------------------------------------------------------------------------------- rows of arguments


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows [1, T, ...] of the first tensor that a module is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.shape[1]
    raise ModelLoadError("a module with recurrent state is called without hidden states")


def rows_of(value: Any, total: int, start: int, end: int) -> Any:
    """Arguments for rows ``start .. end - 1``: of each tensor [1, total, ...] that part, the rest as it is."""
    return map_rows(value, total, lambda x: x[:, start:end])


def map_rows(value: Any, total: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments in which each tensor [1, total, ...] is changed.

    Raises:
        ModelLoadError: a tensor has something else than a row per token.
    """
    if isinstance(value, Tensor):
        if value.ndim < 2 or value.shape[0] != 1 or value.shape[1] != total:
            raise ModelLoadError(
                f"a module with recurrent state is given a tensor {tuple(value.shape)}, not a row per token"
            )
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_rows(item, total, change) for item in value)
    if isinstance(value, dict):
        return {name: map_rows(item, total, change) for name, item in value.items()}
    return value
