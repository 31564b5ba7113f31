"""``draftwise serve``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from draftwise.cli.errors import UsageError
from draftwise.cli.inputs import read_template
from draftwise.cli.options import ENGINE_BOOLEANS, add_engine_options, engine_kwargs, split_names
from draftwise.cli.serve_foreign import SWITCHES, add_foreign, take_server_flags, tell_server_flags
from draftwise.cli.serve_planner import add_planner_flags, make_service
from draftwise.cli.serve_ray import add_ray, serve_on_ray, wants_ray
from draftwise.config.coerce import boolean
from draftwise.config.lora import parse_modules
from draftwise.errors import ConfigError, install, shown
from draftwise.server.reasoning import REASONING_PARSERS
from draftwise.server.tool_parsers import PARSERS

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers
    from draftwise.server.config import ServerConfig

BOOLEANS = (
    *ENGINE_BOOLEANS,
    "access-log",
    "allow-credentials",
    "trust-request-chat-template",
    "enable-auto-tool-choice",
    "enable-force-include-usage",
    "return-tokens-as-token-ids",
    *SWITCHES,
)
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def add_parser(subparsers: Subparsers) -> None:
    """Register ``serve``."""
    parser = subparsers.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        usage="draftwise serve [MODEL] [options]",
        description="Serve a model over HTTP with OpenAI's interface, metrics, and a page to try it. Without a model: "
        "the embedded one. Example: draftwise serve --port 8000",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="local folder or hub id")
    parser.add_argument("--config", metavar="FILE", help="YAML with these options, or with TensorRT-LLM's")
    parser.add_argument("--extra-llm-api-options", dest="config", metavar="FILE", help=argparse.SUPPRESS)
    group = parser.add_argument_group("server")

    def add(name: str, text: str, kind: Any = str, **more: Any) -> None:
        metavar = more.pop("metavar", name.rpartition("-")[2].upper())
        dest = "server_" + name.replace("-", "_")
        group.add_argument(f"--{name}", dest=dest, type=kind, help=text, metavar=metavar, **more)

    add("host", "address to listen at (127.0.0.1; 0.0.0.0: all)")
    add("port", "port to listen at (8000; 0: any free one)", int)
    add("api-key", "key that clients must send, also DRAFTWISE_API_KEY; again: one more", action="append")
    add("ssl-keyfile", "key file: serve HTTPS", metavar="FILE")
    add("ssl-certfile", "certificate file: serve HTTPS", metavar="FILE")
    add("ssl-ca-certs", "certificates that clients' certificates are checked against", metavar="FILE")
    add(
        "allowed-hosts",
        'names under which a server without keys is found, besides its own: ["llm.example.com"]; "*": any',
        _strings,
    )
    add("allowed-origins", 'CORS: origins whose pages may read answers, as JSON: ["https://..."]', _strings)
    add("allowed-methods", 'CORS: methods (["*"])', _strings)
    add("allowed-headers", 'CORS: headers (["*"])', _strings)
    add("allow-credentials", "CORS: allow credentials", _boolean, metavar="BOOL")
    add("max-header-size", "largest first line and headers of a request together in bytes (64 KiB)", int)
    add("max-headers", "most headers of a request (128)", int)
    add("max-body-size", "largest body of a request in bytes (8 MiB)", int)
    add("max-body-depth", "most levels of nesting in a body (128)", int)
    add("max-body-fields", "most named fields in a body, all its objects together (32768)", int)
    add("max-body-values", "most values in a body (262144, or 2 per token of max_model_len)", int)
    add("max-body-memory", "most bytes of bodies over 64 KiB held at once, more get a 429 (256 MiB)", int)
    add(
        "unknown-fields",
        "refuse unknown fields of requests, or warn and ignore them (refuse)",
        metavar="WHAT",
    )
    add("max-concurrent", "most requests being answered at once, more get a 429 (1024)", int)
    add("max-queue", "most samples waiting for the engine, more get a 429 (1024)", int)
    add("max-samples", "most samples (prompts times n) of a request (256)", int)
    add("max-logprobs", "most alternatives per token (20)", int)
    add(
        "max-chunk-rate",
        "most chunks of streams per second; above, one carries several steps (1250 per core; 0: no limit)",
        float,
    )
    add("request-timeout", "deadline of a request in seconds (none)", float, metavar="SECONDS")
    add(
        "header-timeout",
        "most time for the headers of a request to come, 0: any (15)",
        float,
        metavar="SECONDS",
    )
    add("body-timeout", "most time for the body of a request to come, 0: any (60)", float, metavar="SECONDS")
    add(
        "send-timeout",
        "give up clients that leave an answer unread for this long (120)",
        float,
        metavar="SECONDS",
    )
    add("drain-timeout", "seconds to finish requests after SIGTERM (30)", float, metavar="SECONDS")
    group.add_argument(
        "--lora-modules",
        dest="server_lora_modules",
        action="extend",
        nargs="+",
        metavar="NAME=PATH",
        help="with --enable-lora: adapters that are served as models of these names",
    )
    add("chat-template", "a Jinja template, or a file with one", metavar="TEMPLATE")
    add(
        "default-chat-template-kwargs",
        'variables of the chat template for requests that do not set them: {"enable_thinking": false}',
        _mapping,
        metavar="JSON",
    )
    add("enable-force-include-usage", "end every stream with the usage", _boolean, metavar="BOOL")
    add("return-tokens-as-token-ids", "tokens of logprobs as token_id:ID", _boolean, metavar="BOOL")
    add("trust-request-chat-template", "take templates from requests", _boolean, metavar="BOOL")
    add(
        "otlp-traces-endpoint",
        "send OpenTelemetry traces here, over HTTP: http://localhost:4318",
        metavar="URL",
    )
    add(
        "metrics-prefix",
        "prefix of names in /metrics; vllm gives vLLM's names (draftwise)",
        metavar="NAME",
    )
    add_planner_flags(add)
    add("log-interval", "seconds between lines of statistics, 0: none (10)", float, metavar="SECONDS")
    add("access-log", "log every request's path and status", _boolean, metavar="BOOL")
    add("log-level", f"{', '.join(LOG_LEVELS)} (info)", metavar="LEVEL")
    add("tool-call-parser", f"how the model writes tool calls: {', '.join(PARSERS)} (hermes)", metavar="NAME")
    add(
        "reasoning-parser",
        f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)} (none: it is part of the text)",
        metavar="NAME",
    )
    # vLLM needs this to find tool calls; here they are always found.
    hidden = {"help": argparse.SUPPRESS}
    parser.add_argument("--enable-auto-tool-choice", dest="auto_tool_choice", type=_boolean, **hidden)  # type: ignore[arg-type]
    parser.add_argument("--uvicorn-log-level", dest="server_log_level", **hidden)  # type: ignore[arg-type]
    add_ray(parser)
    add_foreign(parser)
    add_engine_options(parser, several_names=True)
    parser.set_defaults(run=run)


def _strings(text: str) -> tuple[str, ...]:
    """A JSON list of strings, or one string."""
    if not text.lstrip().startswith("["):
        return (text,)
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise argparse.ArgumentTypeError(f"expected a JSON list of strings, got {text!r}")
    return tuple(value)


def _mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise serve``."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: {install('serve')}") from None
    engine_options, server_config = settings(args)  # imports parts of the server
    logging.basicConfig(
        level=server_config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    tell_server_flags(args)
    if wants_ray(args):
        return serve_on_ray(args, engine_options, server_config)
    from draftwise.server.sockets import bind, check_tls

    spans = None
    if server_config.otlp_traces_endpoint is not None:  # before the model is loaded: a mistake shows at once
        from draftwise.server.spans import Spans

        spans = Spans(server_config.otlp_traces_endpoint, server_config.model_names[0])
    check_tls(server_config.ssl_keyfile, server_config.ssl_certfile, server_config.ssl_ca_certs)
    with bind(server_config.host, server_config.port) as bound:
        from draftwise.config import resolve_engine_config
        from draftwise.engine.async_llm import AsyncLLM
        from draftwise.fleet.engine import FleetEngine
        from draftwise.profile.beside import fleet_size, scales
        from draftwise.server.app import create_app
        from draftwise.server.run import run as run_server

        config = resolve_engine_config(**engine_options)
        llm: AsyncLLM | FleetEngine
        if scales(server_config):
            begin, most = fleet_size(server_config, config, config.data_parallel_size)
            config = dataclasses.replace(config, data_parallel_size=begin)
            llm = FleetEngine(config, max_chunk_rate=server_config.chunk_rate, most=most)
        elif config.data_parallel_size > 1:
            llm = FleetEngine(config, max_chunk_rate=server_config.chunk_rate)
        else:
            llm = AsyncLLM.from_config(config, max_chunk_rate=server_config.chunk_rate)
        planner = None
        try:
            for module in server_config.lora_modules:
                llm.load_lora(module)
            planner = make_service(llm, server_config)
            if planner is not None:
                planner.start()
            return run_server(
                create_app(llm, server_config, spans=spans, planner=planner), server_config, bound
            )
        finally:
            if planner is not None:
                planner.close()
            llm.close()
            if spans is not None:
                spans.close()


def settings(args: argparse.Namespace) -> tuple[dict[str, Any], ServerConfig]:
    """(keywords of `AsyncLLM`, the server's settings) from flags and a configuration file; flags win.

    Raises UsageError, ConfigError.
    """
    from draftwise.server.config import DEFAULT_MODEL_NAME, ServerConfig
    from draftwise.server.config_file import read_config_file

    file_engine, file_server = read_config_file(args.config) if args.config else ({}, {})
    given = {**take_server_flags(args), **engine_kwargs(args)}
    if "speculative_config" in given or "speculative_model" in given or "speculative_method" in given:
        file_engine.pop("speculative_config", None)
    engine = {**file_engine, **given}
    if args.positional_model is not None:
        if given.get("model") is not None:
            raise UsageError("--model: the model is given twice")
        engine["model"] = args.positional_model
    interval_off = engine.pop("disable_log_stats", None)
    names = engine.pop("served_model_name", None)
    if "served_model_name" in given:
        last = names[-1]
        if len(names) > 1 and not engine.get("model") and ("/" in last or os.path.isdir(last)):
            engine["model"] = names.pop()  # --served-model-name NAME MODEL
        names = split_names(names)
    elif isinstance(names, str):
        names = split_names([names])
    elif names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        raise ConfigError(f"served_model_name: expected a name or a list of names, got {shown(names)}")
    server = {
        **file_server,
        **{
            name.removeprefix("server_"): value
            for name, value in vars(args).items()
            if name.startswith("server_") and value is not None
        },
    }
    if "log_level" in server and server["log_level"].lower() not in LOG_LEVELS:
        raise ConfigError(f"log_level: expected one of {', '.join(LOG_LEVELS)}, got {server['log_level']!r}")
    if "log_level" in server:
        server["log_level"] = server["log_level"].lower()
    if interval_off is not None and str(interval_off).lower() in ("true", "1"):
        server.setdefault("log_interval", 0.0)
    keys = server.pop("api_key", None) or os.environ.get("DRAFTWISE_API_KEY") or ()
    server["api_keys"] = (keys,) if isinstance(keys, str) else tuple(keys)
    if "chat_template" in server:
        server["chat_template"] = read_template(server["chat_template"])
    modules = server.pop("lora_modules", None) or ()
    server["lora_modules"] = parse_modules([modules] if isinstance(modules, str) else modules)
    if modules and not boolean("enable_lora", engine.get("enable_lora") or False):
        raise ConfigError("lora_modules: needs enable_lora")
    server["model_names"] = tuple(names or (engine.get("model") or DEFAULT_MODEL_NAME,))
    return engine, ServerConfig(**server)
