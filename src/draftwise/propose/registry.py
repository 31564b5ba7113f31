"""Proposers by name. Lazy: a class is imported when it is asked for; this module itself needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from draftwise.errors import ConfigError, suggest

if TYPE_CHECKING:
    from draftwise.propose.base import Proposer


ALIASES: dict[str, str] = {
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "draft": "draft_model",
    "draft-model": "draft_model",
    "[suffix]": "suffix",
    "layer_skip": "early_exit",
    "layerskip": "early_exit",
    "self_speculation": "early_exit",
    "deepseek_mtp": "mtp",
    "ernie_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "longcat_flash_mtp": "mtp",
    "mimo_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
"""Spellings that users bring along, and the names they stand for."""

PLANNED = "dflash"
"""Methods that are known but not built; a third party may register one of these names."""

RESERVED = ("none", "auto", "grammar")
"""Names of methods that the engine gives itself: they are nobody else's."""

_registered: dict[str, str | type[Proposer]] = {
    "extract_hidden_states": "draftwise.propose.extract_hidden_states:ExtractHiddenStatesProposer",
    "hybrid": "draftwise.propose.hybrid:HybridProposer",
    "early_exit": "draftwise.propose.models.early_exit:EarlyExitProposer",
    "draft_model": "draftwise.propose.models.draft_model:DraftModelProposer",
    "eagle": "draftwise.propose.heads.eagle:EagleProposer",
    "eagle3": "draftwise.propose.heads.eagle:Eagle3Proposer",
    "medusa": "draftwise.propose.heads.medusa:MedusaProposer",
    "mtp": "draftwise.propose.heads.mtp:MtpProposer",
    "ngram": "draftwise.propose.lookup.ngram:NgramProposer",
    "suffix": "draftwise.propose.lookup.suffix:SuffixProposer",
    "synthetic": "draftwise.propose.synthetic:SyntheticProposer",
}


def available_proposers() -> tuple[str, ...]:
    """Names that `resolve_proposer` knows, sorted."""
    return tuple(sorted(_registered))


def register_proposer(name: str, proposer: type[Proposer] | str) -> None:
    """Make ``proposer`` available as ``method`` of a speculative_config and of a request.

    ``proposer``: a subclass of `Proposer`, or where one is found ("package.module:Class" or
    "package.module.Class"), imported at first use. Registering the same thing twice is allowed.

    Raises:
        ConfigError: the name is empty, contains a dot, is one that the engine gives ("none", "auto", "grammar") or an
            alias of another name, or is taken.
    """
    if not name or not name.isprintable() or "." in name or ":" in name or name in RESERVED:
        raise ConfigError(f"register_proposer: {name!r} cannot name a method")
    if name in ALIASES:
        raise ConfigError(f"register_proposer: {name!r} is another name of {ALIASES[name]!r}")
    if _registered.get(name, proposer) != proposer:
        raise ConfigError(f"register_proposer: {name!r} is taken by {_registered[name]!r}")
    if not isinstance(proposer, str):
        _check_class(proposer, name)
    _registered[name] = proposer


def canonical_name(name: str) -> str:
    """The name that an alias stands for; other names are returned as they are."""
    return name if name in _registered else ALIASES.get(name, name)


def resolve_proposer(name: str) -> type[Proposer]:
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
        known = ", ".join(available_proposers())
        if canonical in PLANNED:
            also = f" (an old name of {canonical!r})" if canonical != name else ""
            raise ConfigError(f"method {name!r}{also} is not supported yet; available: {known}")
        hint = suggest(name, [*_registered, *ALIASES, *PLANNED])
        raise ConfigError(f"unknown method {name!r}{hint} (available: {known}, or a dotted path to a class)")
    if isinstance(target, str):
        target = _load(target, name)
        _registered[canonical] = target
    return target


def _load(path: str, name: str) -> type[Proposer]:
    """Import "package.module:Class" or "package.module.Class"."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty module name
        raise ConfigError(f"method {name!r}: cannot load {path!r}: {error}") from error
    _check_class(found, name)
    loaded: type[Proposer] = found
    return loaded


def _check_class(found: object, name: str) -> None:
    from draftwise.propose.base import Proposer

    if not (isinstance(found, type) and issubclass(found, Proposer)):
        raise ConfigError(f"method {name!r}: {found!r} is no subclass of draftwise.propose.base.Proposer")
