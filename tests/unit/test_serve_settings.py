"""``draftwise serve`` before anything is loaded: what is missing, and settings that cannot hold."""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwise.cli.errors import UsageError
from draftwise.cli.main import build_parser, normalise
from draftwise.cli.serve import BOOLEANS, settings
from draftwise.errors import ConfigError
from draftwise.server.config import ServerConfig
from draftwise.server.config_file import _SERVER_NAMES
from draftwise.server.sockets import bind, check_tls

BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from draftwise.cli.main import main
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize("missing", ["fastapi", "prometheus_client", "uvicorn"])
def test_the_extra_that_is_missing_is_named(missing: str) -> None:
    """In a process of its own, where no part of the server is imported yet."""
    names = {missing, "starlette"} if missing == "fastapi" else {missing}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=sorted(names))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        f"draftwise: {missing} is not installed: run pip install '.[serve]' in the folder of Draftwise's sources\n"
    )


def arguments(*argv: str) -> argparse.Namespace:
    return build_parser("serve").parse_args(normalise(["serve", *argv], BOOLEANS))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"request_timeout": math.nan}, "request_timeout: expected finite seconds > 0, got nan"),
        ({"request_timeout": math.inf}, "request_timeout: expected finite seconds > 0, got inf"),
        ({"drain_timeout": math.inf}, "drain_timeout: expected finite seconds >= 0, got inf"),
        ({"drain_timeout": math.nan}, "drain_timeout: expected finite seconds >= 0, got nan"),
        ({"send_timeout": math.nan}, "send_timeout"),
        ({"log_interval": math.nan}, "log_interval"),
        ({"max_chunk_rate": math.nan}, "max_chunk_rate: expected chunks per second >= 0, got nan"),
    ],
)
def test_no_timer_takes_what_is_no_number(given: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**given)  # type: ignore[arg-type]


def test_certificates_of_clients_are_not_left_unchecked(tmp_path: Path) -> None:
    """Without a certificate of the server there is no TLS, and nobody would be asked for one."""
    authority = tmp_path / "ca.pem"
    authority.write_text("no certificate")
    with pytest.raises(ConfigError, match="ssl_ca_certs: needs ssl_keyfile and ssl_certfile"):
        ServerConfig(ssl_ca_certs=str(authority))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_the_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    key, certificate, junk = (str(tmp_path / name) for name in ("key.pem", "cert.pem", "junk.pem"))
    Path(junk).write_text("no certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    check_tls(key, certificate, certificate)
    with pytest.raises(ConfigError, match=r"^ssl_ca_certs: "):
        check_tls(key, certificate, junk)
    with pytest.raises(ConfigError, match=r"^ssl_keyfile, ssl_certfile: "):
        check_tls(junk, certificate, certificate)


@pytest.mark.parametrize("key", ["secret\n", " secret", "secret\t"])
def test_a_key_that_no_header_can_carry_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets made with ``echo`` end in a line break: every request would get a 401."""
    with pytest.raises(ConfigError, match="api_key: a key must not begin or end with white space"):
        settings(arguments("--api-key", key))
    monkeypatch.setenv("DRAFTWISE_API_KEY", key)
    with pytest.raises(ConfigError, match="api_key"):
        settings(arguments())
    assert settings(arguments("--api-key", "two words"))[1].api_keys == ("two words",)


@pytest.mark.parametrize(
    "flags",
    [("--allow-credentials",), ("--allowed-methods", '["GET"]'), ("--allowed-headers", '["x-a"]')],
)
def test_what_says_nothing_without_origins_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"allow\w+: needs allowed_origins"):
        settings(arguments(*flags))
    settings(arguments("--allowed-origins", '["https://a.example"]', *flags))
    settings(arguments("--allowed-methods", '["*"]', "--allowed-headers", '["*"]'))  # the defaults


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "template").write_bytes("é".encode("latin-1"))
    with pytest.raises(UsageError, match=r"--chat-template .*template: not UTF-8 text"):
        settings(arguments("--chat-template", str(tmp_path / "template")))


def test_a_template_that_is_not_valid_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--chat-template .*missing.jinja: No such file"):
        settings(arguments("--chat-template", str(tmp_path / "missing.jinja")))
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(
        UsageError, match=r"--chat-template .*chat.jinja: not valid Jinja \(line 2\): unexpected"
    ):
        settings(arguments("--chat-template", str(file)))
    with pytest.raises(
        UsageError, match=r"--chat-template: not valid Jinja \(line 1\): No filter named 'no'"
    ):
        settings(arguments("--chat-template", "{{ messages | no }}"))
    good = "{% for m in messages %}{% generation %}{{ raise_exception('x') }}{% endgeneration %}{% break %}{% endfor %}"
    assert settings(arguments("--chat-template", good))[1].chat_template == good


@pytest.mark.parametrize("host", ["a..b", "a" * 300, ".a"])
def test_what_is_no_name_to_listen_at(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at .*no name of a host"):
        bind(host, 0)


# ------------------------------------------------------------------------------------ configuration files


def from_file(tmp_path: Path, text: str) -> tuple[dict[str, Any], ServerConfig]:
    (tmp_path / "serve.yaml").write_text(text)
    return settings(arguments("--config", str(tmp_path / "serve.yaml")))


def test_options_that_are_mappings_and_adapters_in_a_file(tmp_path: Path) -> None:
    _, server = from_file(tmp_path, "default-chat-template-kwargs: {enable_thinking: false}\n")
    assert server.default_chat_template_kwargs == {"enable_thinking": False}
    for modules in ("[a=x, b=y]", '[a=x, \'{"name": "b", "path": "y"}\']'):
        _, server = from_file(tmp_path, f"enable_lora: true\nlora_modules: {modules}\n")
        assert [(m.lora_name, m.lora_path) for m in server.lora_modules] == [("a", "x"), ("b", "y")]
    _, server = from_file(tmp_path, "enable_lora: true\nlora_modules: a=x\n")
    assert [m.lora_name for m in server.lora_modules] == ["a"]


@pytest.mark.parametrize("name", sorted(_SERVER_NAMES))
def test_no_option_of_a_file_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    """A list of dates is of no option's type."""
    with pytest.raises(ConfigError, match=name):
        from_file(tmp_path, f"{name}: [2026-01-01]\n")


@pytest.mark.parametrize("value", ["5", "[1, 2]", "{a: b}"])
def test_names_of_the_model_in_a_file_are_texts(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="served_model_name: expected a name or a list of names"):
        from_file(tmp_path, f"served_model_name: {value}\n")
    assert from_file(tmp_path, "served_model_name: [a, b]\n")[1].model_names == ("a", "b")


def test_several_names_of_the_model_as_flags() -> None:
    """As vLLM has them, separated by blanks, and by commas."""
    for names in (["a", "b"], ["a,b"]):
        engine, server = settings(arguments("M", "--served-model-name", *names, "--port", "1"))
        assert server.model_names == ("a", "b") and engine["model"] == "M" and server.port == 1
        engine, server = settings(arguments("--served-model-name", *names))
        assert server.model_names == ("a", "b") and "model" not in engine
    engine, server = settings(arguments("--served-model-name", "a", "organisation/model"))
    assert server.model_names == ("a",) and engine["model"] == "organisation/model"
