"""Flags of vLLM's server that have no meaning here. Values that change nothing are accepted; others are refused with
a reason."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from draftwise.config.foreign import FOREIGN, Foreign
from draftwise.errors import ConfigError, shown

logger = logging.getLogger("draftwise.server")

_PLUGIN = "no code is loaded into the server; register it in a program of your own that calls create_app"
_LOGGED = "requests are not logged; --access-log logs their path and status"

_SWITCHES = {
    "enable_reasoning": Foreign(None, "--reasoning-parser alone says it"),
    "enable_prompt_tokens_details": Foreign(None, "usage always has them"),
    "enable_server_load_tracking": Foreign(None, "/load always answers"),
    "exclude_tools_when_tool_choice_none": Foreign(None, "tools are always left out then"),
    "disable_uvicorn_access_log": Foreign(None, "there is none without --access-log"),
    "disable_frontend_multiprocessing": Foreign(None, "server and engine are one process"),
    "disable_fastapi_docs": Foreign((False,), refusal="the pages at / and /docs cannot be switched off"),
    "enable_log_outputs": Foreign((False,), refusal=_LOGGED),
    "enable_log_deltas": Foreign((False,), refusal=_LOGGED),
    "enable_request_id_headers": Foreign((False,), refusal="send request_id in the body"),
    "enable_tokenizer_info_endpoint": Foreign((False,), refusal="there are /tokenize and /detokenize"),
    "enable_ssl_refresh": Foreign((False,), refusal="start the server again with new certificates"),
    "enable_sleep_mode": Foreign((False,), refusal="the engine does not move its weights"),
    "headless": Foreign((False,), refusal="every server has its own engine"),
}
_VALUES = {
    "override_generation_config": Foreign(({},), refusal="requests say how they are sampled"),
    "prefix_caching_hash_algo": Foreign(None, "there is one way to find prefixes"),
    "num_scheduler_steps": Foreign((1,), refusal="see --async-scheduling"),
    "response_role": Foreign(("assistant",), refusal="answers are the assistant's"),
    "chat_template_content_format": Foreign(("auto", "string"), refusal="templates get contents as text"),
    "api_server_count": Foreign((1,), refusal="one process serves"),
    "disable_access_log_for_endpoints": Foreign(None, "there is none without --access-log"),
    "max_log_len": Foreign(None, "requests are not logged"),
    "ssl_cert_reqs": Foreign((0,), refusal="--ssl-ca-certs asks clients for a certificate"),
    "h11_max_incomplete_event_size": Foreign((), refusal="see --max-header-size"),
    "h11_max_header_count": Foreign((), refusal="see --max-headers"),
    "root_path": Foreign(("",), refusal="let the proxy take the prefix off"),
    "uds": Foreign((), refusal="it listens at an address: --host, --port"),
    "log_config_file": Foreign((), refusal="see --log-level"),
    "middleware": Foreign(([],), refusal=_PLUGIN),
    "tool_parser_plugin": Foreign(("",), refusal=_PLUGIN),
    "reasoning_parser_plugin": Foreign(("",), refusal=_PLUGIN),
}
_SERVER = {**_SWITCHES, **_VALUES}
_SERVERS_OWN = frozenset({"max_logprobs"})
"""The flags of `FOREIGN` that this server supports itself."""

SWITCHES = (
    *(name.replace("_", "-") for name in _SWITCHES),
    "enable-log-requests", "disable-log-requests", "disable-async-output-proc", "disable-chunked-mm-input",
    "disable-custom-all-reduce", "use-v2-block-manager",
)  # fmt: skip
"""Flags that may stand without a value."""


def add_foreign(parser: argparse.ArgumentParser) -> None:
    """Add these flags without showing them in the help."""
    for name in (*_SERVER, *(name for name in FOREIGN if name not in _SERVERS_OWN)):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=f"foreign_{name}", type=_value, help=argparse.SUPPRESS)


def _value(text: str) -> Any:
    """A value as a Python program would write it. Example: "{}" is {}, "true" is True, "auto" is "auto"."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def take_server_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags for the engine's configuration, which checks them itself.

    Raises ConfigError for a value that would change something."""
    engine: dict[str, Any] = {}
    for name, value in _given(args).items():
        foreign = _SERVER.get(name)
        if foreign is None:
            engine[name] = value
        elif foreign.allowed is not None and value not in foreign.allowed:
            raise ConfigError(f"{name}: {shown(value)} is not supported: {foreign.refusal}")
    return engine


def tell_server_flags(args: argparse.Namespace) -> None:
    """Log the flags that have no effect, with the reason."""
    for name in _given(args):
        if name in _SERVER and _SERVER[name].note:
            logger.info("%s has no effect: %s", name, _SERVER[name].note)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    prefix = "foreign_"
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix) and value is not None
    }
