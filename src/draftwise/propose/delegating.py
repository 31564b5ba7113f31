"""A proposer around another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any

from draftwise.propose.base import Proposer


class DelegatingProposer(Proposer):
    """Passes all hooks and attributes that a subclass does not define on to another proposer, including future ones
    of the contract. A subclass must define ``propose``."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        for name in attributes_of_contract():
            if not _says_itself(type(self), name):
                setattr(self, name, getattr(inner, name))

    @property
    def forward_time(self) -> float:
        return self.inner.forward_time

    @forward_time.setter
    def forward_time(self, value: float) -> None:
        self.inner.forward_time = value


def hooks_of_contract() -> list[str]:
    """Names of the methods of a `Proposer`; not those of the class, such as `create`."""
    return [
        name for name, member in vars(Proposer).items() if isfunction(member) and not name.startswith("_")
    ]


def attributes_of_contract() -> list[str]:
    """Names of the other attributes of a `Proposer`."""
    return [name for name in Proposer.__annotations__ if name not in ("name", "forward_time")]


def _says_itself(cls: type[Proposer], name: str) -> bool:
    own = cls.__mro__[: cls.__mro__.index(DelegatingProposer)]
    return any(name in vars(base) for base in own)


def _hands_on(name: str) -> Callable[..., Any]:
    @wraps(getattr(Proposer, name))
    def hook(self: DelegatingProposer, *args: Any, **options: Any) -> Any:
        return getattr(self.inner, name)(*args, **options)

    return hook


for _name in hooks_of_contract():
    if _name != "propose":
        setattr(DelegatingProposer, _name, _hands_on(_name))
