"""Linear layers at the ends of a module with a state, computed for all rows of a pass at once.

A module with a state is called row by row where rows may be taken back, and each call reads all of its weights. Most of
them are in linear layers that look at a row and at nothing else: those that are given the module's own rows can be
computed before, and the one that makes its answer behind, each in one go. What is left between is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftwise.models.general.modules import PackedLinear


@dataclass(frozen=True, slots=True)
class Ends:
    """Names of a module's linear layers: ``before`` are given its rows, ``behind`` makes its answer (None: something
    else does). Each is called once in a call of the module."""

    before: tuple[str, ...] = ()
    behind: str | None = None


class EndsUse:
    """Watches one call of a module by itself, and tells which of its linear layers are at its ends."""

    def __init__(self, module: nn.Module) -> None:
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._hooks = [
            linear.register_forward_hook(self._noting(name), with_kwargs=True)
            for name, linear in module.named_children()
            if type(linear) is nn.Linear or isinstance(linear, PackedLinear)
        ]

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            given = args[0] if args else kwargs["input"]
            self._calls.setdefault(name, []).append((given, output))

        return note

    def ends(self, rows: Tensor, answer: Tensor) -> Ends:
        """``rows``: what the module was given, ``answer``: what it answered, the very tensors."""
        for hook in self._hooks:
            hook.remove()
        once = {name: calls[0] for name, calls in self._calls.items() if len(calls) == 1}
        behind = next((name for name, (_, output) in once.items() if output is answer), None)
        before = tuple(name for name, (given, _) in once.items() if given is rows and name != behind)
        return Ends(before, behind)


class Hoisted:
    """The ends of a module in one pass. They have to be on our kernels: what computes a row alike in any company."""

    def __init__(self, before: Sequence[PackedLinear], behind: PackedLinear | None) -> None:
        self._before = before
        self._behind = behind
        self._computed: list[Tensor] = []

    @classmethod
    def of(cls, module: nn.Module, ends: Ends) -> Hoisted | None:
        """None: there is nothing to compute at once."""
        found = {name: module._modules.get(name) for name in (*ends.before, ends.behind) if name is not None}
        before = [one for name in ends.before if isinstance(one := found[name], PackedLinear)]
        last = None if ends.behind is None else found[ends.behind]
        behind = last if isinstance(last, PackedLinear) else None
        return cls(before, behind) if before or behind is not None else None

    def begin(self, rows: Tensor) -> None:
        """``rows`` [T, H]: all that the module is given in the pass."""
        self._computed = [linear(rows) for linear in self._before]
        if self._behind is not None:
            self._behind.waits = True

    def take(self, rows: Tensor, count: int) -> None:
        """The next call of the module computes these ``rows`` [B * n], of ``count`` = B requests."""
        for linear, computed in zip(self._before, self._computed, strict=True):
            linear.known = computed.index_select(0, rows).view(count, -1, computed.shape[-1])

    def finished(self, answer: Tensor) -> Tensor:
        """The module's answers [B, n, ...] of all rows, with the last layer behind them; after `end`."""
        return answer if self._behind is None else self._behind(answer)

    def end(self) -> None:
        """The layers compute when they are called, as ever."""
        for linear in self._before:
            linear.known = None
        if self._behind is not None:
            self._behind.waits = False
