"""Rules by name, imported and made on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from draftwise.errors import ConfigError, suggest
from draftwise.verify.base import Rule

RuleFactory = Callable[[], Rule]

_BUILT_IN = {
    "greedy": ("draftwise.verify.greedy", "GreedyRule"),
    "rejection": ("draftwise.verify.rejection", "RejectionRule"),
    "block": ("draftwise.verify.block", "BlockRule"),
    "coupled": ("draftwise.verify.coupled", "CoupledRule"),
    "typical": ("draftwise.verify.typical", "TypicalRule"),
    "synthetic": ("draftwise.verify.synthetic", "SyntheticRule"),
}
_factories: dict[str, RuleFactory] = {}
_rules: dict[str, Rule] = {}


def register_verifier(name: str, factory: RuleFactory) -> None:
    """Make a rule available under ``name``. ``factory``: a `Rule` subclass, or anything that makes one, such as
    ``lambda: TypicalRule(epsilon=0.2)``. Raises `ConfigError` if the name is taken by another rule."""
    if name in _BUILT_IN or _factories.get(name, factory) is not factory:
        raise ConfigError(f"a verification rule named {name!r} exists already")
    _factories[name] = factory


def is_foreign(name: str) -> bool:
    """Whether a program registered it."""
    return name in _factories


def verifier_names() -> tuple[str, ...]:
    """All names that `get_rule` knows."""
    return (*_BUILT_IN, *_factories)


def get_rule(name: str) -> Rule:
    """The shared instance of a rule, imported and made on first use. Raises `ConfigError` if unknown."""
    rule = _rules.get(name)
    if rule is None:
        if name in _BUILT_IN:
            module, attribute = _BUILT_IN[name]
            made: object = getattr(import_module(module), attribute)()
        elif name in _factories:
            made = _factories[name]()
        else:
            valid = verifier_names()
            raise ConfigError(
                f"unknown verification rule {name!r}{suggest(name, valid)}; valid rules: {', '.join(valid)}"
            )
        if not isinstance(made, Rule):
            raise ConfigError(
                f"verification rule {name!r} is a {type(made).__name__}, not a verify.base.Rule"
            )
        rule = _rules[name] = made
    return rule
