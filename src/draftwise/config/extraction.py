"""Settings of ``extract_hidden_states``: which layers, and where to. Names are those of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.config import coerce as to
from draftwise.errors import ConfigError, suggest

METHOD = "extract_hidden_states"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_CONNECTORS = ("ExampleHiddenStatesConnector",)
_FIELDS = ("kv_connector", "kv_role", "kv_connector_extra_config")


def extracted_layers(draft_model_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The layers of ``{"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 34]}}`` (or of the inner mapping).

    Raises:
        ConfigError: no layer is named, one is named twice, or the value has another form.
    """
    name = "speculative_config.draft_model_config"
    given = dict(draft_model_config or {})
    inner = given.pop("hf_config", None)
    if inner is not None:
        if given:
            raise ConfigError(f"{name}: unknown field {next(iter(given))!r}; only hf_config")
        name, given = f"{name}.hf_config", dict(to.mapping(f"{name}.hf_config", inner))
    layers = given.pop(_LAYERS, None)
    if given:
        raise ConfigError(
            f"{name}: unknown field {next(iter(given))!r}{suggest(str(next(iter(given))), [_LAYERS])}"
        )
    if layers is None:
        raise ConfigError(f"{name}: method {METHOD!r} needs the layers to extract, {_LAYERS}: [2, 6, 9]")
    found: tuple[int, ...] = to.sequence_of(to.integer(0), "a list of layers")(f"{name}.{_LAYERS}", layers)
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"{name}.{_LAYERS}: expected distinct layers, at least one, got {list(found)!r}")
    return found


def transfer_folder(kv_transfer_config: Mapping[str, Any] | None) -> str | None:
    """The folder that a connector for hidden states writes to (``shared_storage_path``); None: none is given.

    Raises:
        ConfigError: a connector for something else, a role that writes nothing, no folder, or an unknown field.
    """
    if kv_transfer_config is None:
        return None
    for name in kv_transfer_config:
        if name not in _FIELDS:
            raise ConfigError(f"kv_transfer_config: unknown field {name!r}{suggest(str(name), _FIELDS)}")
    connector = kv_transfer_config.get("kv_connector")
    if connector not in _CONNECTORS:
        raise ConfigError(
            f"kv_transfer_config.kv_connector: {connector!r} is not supported; there is {_CONNECTORS[0]}, for "
            f"method {METHOD!r}"
        )
    role = kv_transfer_config.get("kv_role", "kv_producer")
    if role not in ("kv_producer", "kv_both"):
        raise ConfigError(f"kv_transfer_config.kv_role: expected 'kv_producer', got {role!r}")
    name = "kv_transfer_config.kv_connector_extra_config"
    extra = to.mapping(name, kv_transfer_config.get("kv_connector_extra_config") or {})
    folder = extra.get("shared_storage_path")
    if not isinstance(folder, str) or not folder or set(extra) != {"shared_storage_path"}:
        raise ConfigError(f"{name}: expected {{'shared_storage_path': folder}}, got {dict(extra)!r}")
    return folder
