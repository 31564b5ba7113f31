"""Modules of a Transformers model that carry a state from token to token, found by what they do with their cache.

In a pass a model computes the rows of all requests as one sequence. For what has no state, and for attention, which is
taken by `attention.Paged`, that is right. A module with a state is instead called once per request, or once for one
token of each of many requests, with a cache of its own that holds that state and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftwise.errors import ModelLoadError
from draftwise.models.general.hoisting import Ends

StateKey = tuple[str, int, int]
"""Kind of a state, the layer that it is said to be of, and which of that kind there."""


class StateView:
    """Stands for Transformers' cache in one call of one module: it gives the states that it was made of, and takes new
    ones. Some modules write into what they were given, so it has to be the caller's own.
    """

    def __init__(self, states: Mapping[StateKey, Tensor] | None = None) -> None:
        """``states``: [B, ...] each, behind the tokens before; None: there are none."""
        self.states: dict[StateKey, Tensor] = dict(states or {})
        self._before = states is not None
        self.touched = False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get("recurrent", layer_idx, state_idx)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._get("linear", layer_idx, 0)

    def _get(self, kind: str, layer: int, index: int) -> Tensor | None:
        self.touched = True
        return self.states.get((kind, layer, index)) if self._before else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Take the inputs of a convolution, [B, C, n]: its state is the last ``conv_kernel_size`` of all there were.

        Returns:
            The state before and these inputs behind it, [B, C, more]. Before a first token stand zeros, if the inputs
            are fewer than the kernel.
        """
        self.touched = True
        key = ("conv", layer_idx, state_idx)
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
        self.states["recurrent", layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.touched = True
        self.states["linear", layer_idx, 0] = linear_cache

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._before

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # Of a cache of keys and values that is empty: attention asks it while states are looked for.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return indexer_key_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class Runner(Protocol):
    """Computes the modules with a state, in a pass."""

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's result for all rows of the pass."""


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
class Unit(ABC):
    """One module with a state.

    ``tensors``: shape and dtype of each part of its state, of one request. ``chunks``: whether several tokens can
    follow a state in one call; else they come one by one. ``batches``: whether tokens of several requests can be
    computed in one call. ``first``: which of the model's state tensors are its own:
    ``first``, ``first + 1``, ... ``answers``: which items of the tuple that it answers have a row per token, of how
    many items; None: it answers with one tensor. Items without rows are left out. ``ignored``: arguments, by place or
    name, that it does not look at: masks of attention. ``ends``: its linear layers that can be computed apart.
    """

    module: nn.Module
    forward: Callable[..., Any]
    place: int  # of the parameter by which it is told of states, among those without names
    name: str  # of that parameter
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    chunks: bool = False
    batches: bool = False
    first: int = 0
    answers: tuple[tuple[int, ...], int] | None = None
    ignored: frozenset[int | str] = frozenset()
    ends: Ends = field(default_factory=Ends)

    @abstractmethod
    def start(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Sequence[Tensor] | None
    ) -> tuple[Any, list[Tensor]]:
        """The module's result, and the states behind it. See `call`."""

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute n tokens of B requests from their ``states`` [B, ...] each, which are overwritten; None: from none.

        Returns:
            What the module answers, tensors [B, n, ...], and the states behind these tokens.
        """
        answer, after = self.start(args, kwargs, states)
        rows = [answer] if self.answers is None else [answer[i] for i in self.answers[0]]
        return rows, after

    def answer(self, rows: Sequence[Tensor]) -> Any:
        """The tensors of `call` as the module answers with them."""
        if self.answers is None:
            return rows[0]
        places, count = self.answers
        items: list[Tensor | None] = [None] * count
        for place, x in zip(places, rows, strict=True):
            items[place] = x
        return tuple(items)

    def needed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without those that are ignored."""
        if not self.ignored:
            return args, kwargs
        return (
            tuple(None if i in self.ignored else value for i, value in enumerate(args)),
            {name: None if name in self.ignored else value for name, value in kwargs.items()},
        )

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
        """Call the module with its parameter set to ``value``."""
        if self.place < len(args):
            args = (*args[: self.place], value, *args[self.place + 1 :])
        else:
            kwargs = {**kwargs, self.name: value}
        return self.forward(*args, **kwargs)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of its parameter."""
        return args[self.place] if self.place < len(args) else kwargs.get(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = _runner.get()
        return self.forward(*args, **kwargs) if runner is None else runner.run(self, args, kwargs)


@dataclass(eq=False)
class CacheUnit(Unit):
    """Its state is what it asks of the cache that it is given, and leaves there."""

    keys: tuple[StateKey, ...] = ()

    def start(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Sequence[Tensor] | None
    ) -> tuple[Any, list[Tensor]]:
        view = StateView(None if states is None else dict(zip(self.keys, states, strict=True)))
        answer = self.told(args, kwargs, view)
        if not self.keys:
            self.keys = tuple(sorted(view.states))
        return answer, [view.states[key] for key in self.keys]


@dataclass(eq=False)
class AttributeUnit(Unit):
    """It keeps its state to itself, in attributes of its own and its parts, if it is told to use a cache."""

    keys: tuple[tuple[nn.Module, str], ...] = ()

    def start(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Sequence[Tensor] | None
    ) -> tuple[Any, list[Tensor]]:
        for i, (part, name) in enumerate(self.keys):
            setattr(part, name, None if states is None else states[i])
        try:
            answer = self.told(args, kwargs, True)
            return answer, [getattr(part, name) for part, name in self.keys]
        finally:
            for part, name in self.keys:
                setattr(part, name, None)

    def kept(self) -> dict[tuple[nn.Module, str], Any]:
        """The attributes that may be a state."""
        return {
            (part, name): value
            for part in self.module.modules()
            for name, value in vars(part).items()
            if value is None or isinstance(value, Tensor)
        }


@dataclass(eq=False)
class ArgumentUnit(Unit):
    """It is given its state, and answers with the next one behind its rows.

    ``initial``: the states of all layers, [1, ..., layers] each, before a first token, where a model keeps them so;
    ``layer``: which of them is its own.
    """

    initial: tuple[Tensor, ...] = ()
    layer: int = 0

    def start(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], states: Sequence[Tensor] | None
    ) -> tuple[Any, list[Tensor]]:
        kwargs = {name: value for name, value in kwargs.items() if name != "use_cache"}
        if not self.initial:
            answer = self.told(args, kwargs, states and tuple(states))
            return answer, list(answer[1])
        count = rows_shape(args, kwargs)[0]
        every = [tensor.expand(count, *tensor.shape[1:]).clone() for tensor in self.initial]
        for i, state in enumerate(states or ()):
            every[i][..., self.layer] = state
        answer = self.told(args, {**kwargs, "use_cache": True}, every)
        return answer, [tensor[..., self.layer] for tensor in answer[1]]


# ---------------------------------------------------------------------------------------- rows of arguments


def first_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor [B, n, ...] that a module is called with: its hidden states."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise ModelLoadError("a module with recurrent state is called without hidden states")


def rows_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(B, n) of `first_rows`: n tokens of each of B sequences."""
    rows = first_rows(args, kwargs)
    return rows.shape[0], rows.shape[1]


def has_rows(value: Tensor, shape: tuple[int, int]) -> bool:
    """Whether it is [B, n, ...], or [1, n, ...] for all sequences."""
    return value.ndim >= 2 and value.shape[1] == shape[1] and value.shape[0] in (1, shape[0])


def map_rows(value: Any, shape: tuple[int, int], change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments in which each tensor [B, n, ...], or [1, n, ...] for all sequences, is put in order as rows
    [B * n, ...] and changed.

    Raises:
        ModelLoadError: a tensor has something else than a row per token.
    """
    if isinstance(value, Tensor):
        if not has_rows(value, shape):
            raise ModelLoadError(
                f"a module with recurrent state is given a tensor {tuple(value.shape)}, not a row per token"
            )
        return change(value.expand(shape[0], *value.shape[1:]).flatten(0, 1))
    if isinstance(value, (tuple, list)):
        return type(value)(map_rows(item, shape, change) for item in value)
    if isinstance(value, dict):
        return {name: map_rows(item, shape, change) for name, item in value.items()}
    return value
