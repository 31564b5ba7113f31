"""Which names and which pages a server without keys takes for its own."""

from __future__ import annotations

import pytest

from draftwise.errors import ConfigError
from draftwise.server.config import ServerConfig
from draftwise.server.hosts import Hosts, name_of


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8000", "localhost"),
        ("LocalHost", "localhost"),
        ("localhost.", "localhost"),
        ("[::1]:8000", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("", None),
        (":80", None),
        ("a b@localhost", None),
        ("evil.example/localhost", None),
        ("evil.example#localhost", None),
        ("localhost:port", None),
        ("[::1", None),
    ],
)
def test_names(host: str, name: str | None) -> None:
    assert name_of(host) == name


def test_a_local_server_knows_itself_and_nobody_else() -> None:
    local = Hosts("127.0.0.1")
    for host in (
        "127.0.0.1:8000",
        "localhost:1",
        "a.localhost",
        "[::1]:8000",
        "192.168.0.2",
        "host.docker.internal",
    ):
        assert local.knows(host), host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1:8000@evil.example",
                 "mybox", "box.local", "1", "0x7f.1", "notlocalhost", "xinternal", "svc.cluster"):  # fmt: skip
        assert not local.knows(host), host
    assert Hosts("mybox.example").knows("MyBox.example:8000")


def test_a_server_of_a_network_is_found_under_names_that_nobody_can_register() -> None:
    for bound in ("0.0.0.0", "::", "192.168.0.2", ""):
        network = Hosts(bound)
        for host in (
            "draftwise:8000",
            "box.local",
            "a.svc.cluster.local",
            "nas.home.arpa",
            "10.0.0.1",
            "localhost",
        ):
            assert network.knows(host), (bound, host)
        for host in ("evil.example", "draftwise.evil.example"):
            assert not network.knows(host), (bound, host)


def test_listed_names() -> None:
    listed = Hosts("127.0.0.1", ("LLM.example.com", "*.corp.example"))
    assert listed.knows("llm.example.com:443") and listed.knows("a.b.corp.example")
    assert not listed.knows("corp.example") and not listed.knows("xcorp.example")
    assert Hosts("127.0.0.1", ("*",)).knows("anything.example")


def test_origins() -> None:
    plain = Hosts("127.0.0.1")
    assert plain.is_own("http://127.0.0.1:8000", "127.0.0.1:8000")
    assert plain.is_own("https://localhost", "localhost:443") and plain.is_own(
        "http://localhost", "LOCALHOST"
    )
    for origin in ("null", "", "file://", "http://127.0.0.1:9000", "http://127.0.0.1", "https://evil.example",
                   "chrome-extension://abc", "ftp://127.0.0.1:8000", "http://[::1"):  # fmt: skip
        assert not plain.is_own(origin, "127.0.0.1:8000"), origin
    allowed = Hosts("127.0.0.1", (), ("https://app.example", "null"))
    assert allowed.is_own("https://App.example", "x") and allowed.is_own("null", "x")
    assert not allowed.is_own("http://app.example", "x")
    # Behind a proxy that puts another Host in. "*" says that any name is this server's, not that any page is.
    assert Hosts("127.0.0.1", ("llm.example",)).is_own("https://llm.example", "127.0.0.1:8000")
    assert not Hosts("127.0.0.1", ("*",)).is_own("https://llm.example", "127.0.0.1:8000")


@pytest.mark.parametrize("name", ["", "*.", "http://a.example", "a.example:80", "*.*.example", "a*.example"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(name,))
