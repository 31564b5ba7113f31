"""Settings from the config.json of a draft head. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise.config.methods import method_of, read_config, tensor_names
from draftwise.errors import ConfigError
from draftwise.names import HEAD_METHODS


@dataclass(frozen=True, slots=True)
class HeadDefaults:
    """Settings of a head's own config.json; they hold where the user gives none."""

    num_tokens: int | None = None
    tree: tuple[tuple[int, ...], ...] | None = None
    parallel: bool = False  # P-EAGLE: it drafts all tokens in one pass, and no other way
    method: str | None = None  # what it is a head for, where its config.json says so


def head_defaults(method: str, model: str, revision: str | None) -> HeadDefaults:
    """Read ``model``'s config.json, local or in the hub's cache; without one there are no settings."""
    config = read_config(model, revision)
    if config is None:
        return HeadDefaults()
    told = method_of(config)
    tree = config.get("medusa_choices") if method == "medusa" else None
    return HeadDefaults(
        num_tokens=_num_tokens(method, config, _medusa_heads_in(model) if method == "medusa" else None),
        tree=None if tree is None else sorted_choices(tree, f"{model}: medusa_choices"),
        parallel=method == "eagle3" and _drafts_in_parallel(config),
        method=told if told in HEAD_METHODS else None,
    )


def _drafts_in_parallel(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its EAGLE-3 head was trained to fill in masks (P-EAGLE)."""
    kind = str(config.get("speculators_model_type") or "").lower()
    architectures = " ".join(map(str, config.get("architectures") or ())).lower()
    return (
        kind in ("peagle", "p-eagle") or "peagle" in architectures or config.get("parallel_drafting") is True
    )


def mask_token_of(config: Mapping[str, Any]) -> int | None:
    """The mask token's id as published configurations name it: ``pard_token`` (PARD, and what P-EAGLE heads are given
    for vLLM), ``mask_token_id`` (speculators), ``ptd_token_id`` (P-EAGLE)."""
    for name in ("pard_token", "mask_token_id", "ptd_token_id"):
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def block_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a block drafter (DFlash and its kin), which stand in ``dflash_config`` or at the top."""
    return {**config, **_mapping(config.get("dflash_config"))}


def drafts_from_root(config: Mapping[str, Any]) -> bool:
    """Whether the row of the last known token gives a block drafter's first draft (DSpark), or the first mask's."""
    own = block_settings(config)
    for name in ("sample_from_anchor", "shift_label"):
        if isinstance(own.get(name), bool):
            return bool(own[name])
    kind = str(config.get("speculators_model_type") or "").lower()
    architectures = " ".join(map(str, config.get("architectures") or ())).lower()
    return "dspark" in kind or "dspark" in architectures


def _medusa_heads_in(model: str) -> int | None:
    """The number of Medusa heads in a local folder's file, because config.json may say fewer. None: unknown."""
    folder = Path(model).expanduser()
    for name in ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"):
        found = re.findall(rb"(?:^|[^\d])(\d+)\.0\.linear\.|blocks\.(\d+)\.", tensor_names(folder / name))
        if found:
            return 1 + max(int(first or second) for first, second in found)
    return None


def _num_tokens(method: str, config: Mapping[str, Any], heads_in_file: int | None = None) -> int | None:
    values: list[Any] = [config.get("num_lookahead_tokens")]
    if method == "medusa":
        values += [heads_in_file, config.get("medusa_num_heads"), config.get("num_heads")]
    proposals = _mapping(config.get("speculators_config")).get("proposal_methods")
    if isinstance(proposals, list) and proposals:
        values.append(_mapping(proposals[0]).get("speculative_tokens"))
    if method == "eagle3" and _drafts_in_parallel(config):
        values.append(config.get("num_depths"))  # as many as it was trained to draft
    if method == "dflash":
        size = block_settings(config).get("block_size")
        if isinstance(size, int) and not isinstance(size, bool):
            values.append(size if drafts_from_root(config) else size - 1)
    found = (v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0)
    return next(found, None)


def sorted_choices(choices: object, name: str) -> tuple[tuple[int, ...], ...]:
    """``medusa_choices`` as ``speculative_token_tree`` wants its paths: level by level, siblings by rank.

    Example: [[0], [0, 0], [1], [0, 1]] -> ((0,), (1,), (0, 0), (0, 1)).

    Raises:
        ConfigError: no list of paths.
    """
    paths: list[tuple[int, ...]] = []
    for path in choices if isinstance(choices, list | tuple) else [None]:
        if not isinstance(path, list | tuple) or not path or not all(type(rank) is int for rank in path):
            raise ConfigError(f"{name}: expected a list of paths of ranks, such as [[0], [1], [0, 0]]")
        paths.append(tuple(path))
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


@dataclass(frozen=True, slots=True)
class ServedSpeculator:
    """A folder in the format of the speculators project, named as the model to serve: the head is in it, and the
    target is its verifier."""

    verifier: str
    method: str


def served_speculator(model: str, revision: str | None) -> ServedSpeculator | None:
    """The target and head if ``model`` is such a folder or hub id; None: it is a model itself.

    Raises:
        ConfigError: it is such a folder and names no verifier.
    """
    config = read_config(model, revision, field="model")
    if config is None or "speculators_model_type" not in config:
        return None
    verifier = _mapping(_mapping(config.get("speculators_config")).get("verifier")).get("name_or_path")
    if not isinstance(verifier, str) or not verifier:
        raise ConfigError(
            f"model: {model!r} is a draft head whose config.json names no verifier "
            "(speculators_config.verifier.name_or_path); name the target as the model, and the head in "
            "speculative_config"
        )
    beside = Path(model).expanduser() / verifier
    if not Path(verifier).is_absolute() and beside.is_dir():
        verifier = str(beside)
    return ServedSpeculator(verifier, method_of(config))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
