"""Methods by name: those built in, and those that third parties register. A class is imported when it is asked for, by
its path, so that configurations can be checked before anything heavy is loaded: this needs no torch."""

from __future__ import annotations

import importlib
from typing import Any

from draftwise.errors import ConfigError, suggest
from draftwise.names import METHOD_ALIASES, METHODS, PLANNED_METHODS, PROPOSER, RESERVED_METHODS

_registered: dict[str, str | type[Any]] = dict(METHODS)


def available_methods() -> tuple[str, ...]:
    """Names that `method_class` knows, sorted."""
    return tuple(sorted(_registered))


def register_method(name: str, proposer: type[Any] | str) -> None:
    """See `draftwise.register_proposer`, which is the typed form of this function."""
    if not name or not name.isprintable() or "." in name or ":" in name or name in RESERVED_METHODS:
        raise ConfigError(f"register_proposer: {name!r} cannot name a method")
    if name in METHOD_ALIASES:
        raise ConfigError(f"register_proposer: {name!r} is another name of {METHOD_ALIASES[name]!r}")
    if _registered.get(name, proposer) != proposer:
        raise ConfigError(f"register_proposer: {name!r} is taken by {_registered[name]!r}")
    if not isinstance(proposer, str):
        _check_class(proposer, name)
    _registered[name] = proposer


def third_party_methods() -> tuple[tuple[str, str], ...]:
    """Methods that were registered from outside, each with the path of its class: for other processes.

    Raises:
        ConfigError: a class that cannot be imported there (it is in ``__main__``, or in a function).
    """
    found = []
    for name, target in _registered.items():
        if name in METHODS:
            continue
        path = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        if path.startswith("__main__") or "<locals>" in path:
            raise ConfigError(
                f"tensor_parallel_size: method {name!r} ({path}) cannot be imported by the ranks' processes; put its "
                "class into a module"
            )
        found.append((name, path))
    return tuple(found)


def canonical_name(name: str) -> str:
    """The name that an alias stands for; other names are returned as they are."""
    return name if name in _registered else METHOD_ALIASES.get(name, name)


def method_class(name: str) -> type[Any]:
    """The class behind a name, an alias, or a path to a class outside the package.

    Raises:
        ConfigError: the name is unknown (the closest one is suggested) or stands for a method that is not
            supported yet, or the path leads to nothing, or to something that is no `Proposer`.
    """
    canonical = canonical_name(name)
    target = _registered.get(canonical)
    if target is None:
        if "." in name or ":" in name:
            return _load(name, name)
        known = ", ".join(available_methods())
        if canonical in PLANNED_METHODS:
            also = f" (an old name of {canonical!r})" if canonical != name else ""
            raise ConfigError(f"method {name!r}{also} is not supported yet; available: {known}")
        hint = suggest(name, [*_registered, *METHOD_ALIASES, *PLANNED_METHODS])
        raise ConfigError(f"unknown method {name!r}{hint} (available: {known}, or a dotted path to a class)")
    if isinstance(target, str):
        target = _load(target, name)
        _registered[canonical] = target
    return target


def _load(path: str, name: str) -> type[Any]:
    """Import the class at a path and check it."""
    try:
        found = _imported(path)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty module name
        raise ConfigError(f"method {name!r}: cannot load {path!r}: {error}") from error
    _check_class(found, name)
    loaded: type[Any] = found
    return loaded


def _imported(path: str) -> Any:
    """The object at "package.module:Name" or "package.module.Name"."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _check_class(found: object, name: str) -> None:
    if not (isinstance(found, type) and issubclass(found, _imported(PROPOSER))):
        raise ConfigError(f"method {name!r}: {found!r} is not a subclass of {PROPOSER.replace(':', '.')}")
