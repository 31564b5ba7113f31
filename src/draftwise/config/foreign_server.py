"""Flags of vLLM's server that have no meaning here, on command lines and in files. Values that change nothing are
accepted; others are refused with a reason."""

from __future__ import annotations

from typing import Any

from draftwise.config.foreign import Foreign
from draftwise.errors import ConfigError, shown

_PLUGIN = "no code is loaded into the server; register it in a program of your own that calls create_app"
_LOGGED = "requests are not logged; --access-log logs their path and status"

SERVER_SWITCHES = {
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
SERVER_VALUES = {
    "override_generation_config": Foreign(({},), refusal="requests say how they are sampled"),
    "prefix_caching_hash_algo": Foreign(None, "there is one way to find prefixes"),
    "num_scheduler_steps": Foreign((1,), refusal="see --rounds-per-step"),
    "stream_interval": Foreign(None, "--max-chunk-rate says how often streams are written"),
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
SERVER_FLAGS = {**SERVER_SWITCHES, **SERVER_VALUES}


def check_server_flag(name: str, value: Any) -> None:
    """One of `SERVER_FLAGS`. Raises ConfigError for a value that would change something."""
    foreign = SERVER_FLAGS[name]
    if foreign.allowed is not None and value not in foreign.allowed:
        raise ConfigError(f"{name}: {shown(value)} is not supported: {foreign.refusal}")
