"""Flags of vLLM's server: what changes nothing is taken, what cannot be had is refused with a reason."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import pytest

from draftwise.cli import serve
from draftwise.cli.main import main
from draftwise.cli.serve_foreign import tell_server_flags
from draftwise.errors import ConfigError
from draftwise.server.config import ServerConfig


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``given("--flag", ...)``: (engine's keywords, server's settings, arguments)."""
    seen: list[tuple[dict[str, Any], ServerConfig, argparse.Namespace]] = []

    def run(args: argparse.Namespace) -> int:
        seen.append((*serve.settings(args), args))
        return 0

    monkeypatch.setattr(serve, "run", run)

    def parse(*flags: str) -> tuple[dict[str, Any], ServerConfig, argparse.Namespace]:
        assert main(["serve", *flags]) == 0, flags
        return seen.pop()

    return parse


def test_what_changes_nothing_is_taken_and_said(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    flags = """--enable-reasoning --reasoning-parser qwen3 --enable-prompt-tokens-details --response-role assistant
        --chat-template-content-format auto --api-server-count 1 --disable-log-requests --max-log-len 100
        --exclude_tools_when_tool_choice_none --disable-uvicorn-access-log --tokenizer-mode auto --load-format auto"""
    engine, server, args = given(*flags.split())
    assert server.reasoning_parser == "qwen3"
    assert engine == {"disable_log_requests": "true", "tokenizer_mode": "auto", "load_format": "auto"}
    with caplog.at_level(logging.INFO, "draftwise.server"):
        tell_server_flags(args)
    assert "enable_reasoning has no effect: --reasoning-parser alone says it" in caplog.text
    assert "max_log_len has no effect" in caplog.text and "response_role" not in caplog.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--uds", "/tmp/x"], "uds: '/tmp/x' is not supported: it listens at an address"),
        (["--root-path", "/api"], "root_path"),
        (["--middleware", "a.b"], "no code is loaded"),
        (["--tool-parser-plugin", "a.py"], "no code is loaded"),
        (["--api-server-count", "4"], "one process serves"),
        (["--enable-sleep-mode"], "does not move its weights"),
        (["--disable-fastapi-docs"], "cannot be switched off"),
        (["--chat-template-content-format", "openai"], "contents as text"),
        (["--response-role", "bot"], "response_role"),
        (
            ["--default-chat-template-kwargs", '{"tools": 1}'],
            "default_chat_template_kwargs: 'tools' cannot be set",
        ),
        (["--reasoning-parser", "qwen"], "did you mean 'qwen3'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_reason(
    given: Any, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        given(*flags)
    assert words in capsys.readouterr().err


def test_defaults_of_requests(given: Any) -> None:
    _, server, _ = given(
        "--default-chat-template-kwargs", '{"enable_thinking": false}', "--enable-force-include-usage",
        "--return-tokens-as-token-ids",
    )  # fmt: skip
    assert server.default_chat_template_kwargs == {"enable_thinking": False}
    assert server.enable_force_include_usage and server.return_tokens_as_token_ids


def test_values_that_are_no_mapping() -> None:
    with pytest.raises(ConfigError, match="expected a mapping"):
        ServerConfig(default_chat_template_kwargs=[])  # type: ignore[arg-type]
