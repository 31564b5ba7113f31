"""Proposers by name: `config.registry` with types. Needs no torch before a class is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwise.config.registry import method_class, register_method

if TYPE_CHECKING:  # importing the contract takes torch
    from draftwise.propose.base import Proposer


def register_proposer(name: str, proposer: type[Proposer] | str) -> None:
    """Make ``proposer`` available as ``method`` of a speculative_config and of a request.

    ``proposer``: a subclass of `Proposer`, or where one is found ("package.module:Class" or
    "package.module.Class"), imported at first use. Registering the same thing twice is allowed.

    Raises:
        ConfigError: the name is empty, contains a dot, is one that the engine gives ("none", "auto", "grammar") or an
            alias of another name, or is taken.
    """
    register_method(name, proposer)


def resolve_proposer(name: str) -> type[Proposer]:
    """The class behind a name, an alias, or a path to a class outside the package.

    Raises:
        ConfigError: the name is unknown (the closest one is suggested) or stands for a method that is not
            supported yet, or the path leads to nothing, or to something that is no `Proposer`.
    """
    return method_class(name)
