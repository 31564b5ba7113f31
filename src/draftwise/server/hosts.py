"""Which requests a server without keys answers. Any web page that its user visits can send requests to 127.0.0.1.

Two headers decide, and a page can set neither. `Origin` is where the page came from; it is there whenever a page of
another origin sends a body. `Host` is the name under which the browser found this server: a page whose own name was
pointed at 127.0.0.1 (DNS rebinding) has this server as its origin, and that name in `Host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from draftwise.errors import ConfigError
from draftwise.server.errors import APIError

_OWN_SUFFIXES = (".localhost", ".internal")
"""Suffixes of names that cannot be registered: browsers resolve the first locally, and the second is for private
networks (such
as host.docker.internal)."""
_PRIVATE_SUFFIXES = (*_OWN_SUFFIXES, ".local", ".home.arpa")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Hosts:
    """The names under which a server may be asked, and the origins whose pages may ask it.

    Known without being listed are addresses (a page found under an address cannot have moved there from elsewhere),
    ``localhost``, ``*.localhost``, ``*.internal`` and the name that the server was told to listen at. A server that
    listens at more than the loopback is found under names of its network, too: those without a dot (of containers, of
    machines), ``*.local`` and ``*.home.arpa``, none of which anybody can register.
    """

    def __init__(
        self, bound: str, allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = ()
    ) -> None:
        """``bound``: what to listen at; ``allowed_hosts``: names, also as ``*.example.com``, or ``*``."""
        self._bound = bound.lower()
        self._everywhere = not _is_loopback(bound)
        self._names = frozenset(name.lower() for name in allowed_hosts if not name.startswith("*."))
        self._suffixes = tuple(name[1:].lower() for name in allowed_hosts if name.startswith("*."))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    def knows(self, host: str) -> bool:
        """Whether a ``Host`` header names this server. Example: "127.0.0.1:8000", "[::1]:8000", "localhost"."""
        name = name_of(host)
        if name is None:
            return False
        if "*" in self._names or self._listed(name):
            return True
        if name in ("localhost", self._bound) or _is_address(name):
            return True
        if self._everywhere:
            return "." not in name or name.endswith(_PRIVATE_SUFFIXES)
        return name.endswith(_OWN_SUFFIXES)

    def is_own(self, origin: str, host: str) -> bool:
        """Whether a page of ``origin`` may send requests: it came from this server, or is allowed."""
        origin = origin.lower()
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in _DEFAULT_PORTS or not parts.netloc:
            return False  # "null", extensions, files
        if parts.netloc == host.lower().removesuffix(_DEFAULT_PORTS[parts.scheme]):
            return True
        # Behind a proxy that puts another Host in: the name under which the proxy is found.
        name = name_of(parts.netloc)
        return name is not None and self._listed(name)

    def _listed(self, name: str) -> bool:
        return name in self._names or name.endswith(self._suffixes)

    def refusal(self, headers: Mapping[bytes, bytes], path: str) -> APIError | None:
        """The reason to refuse a request; None: it is answered. ``headers``: the last of each name, in lower case."""
        host = headers.get(b"host", b"").decode("latin-1")
        # Without a name no browser asks. Load balancers ask for a server's health under any.
        if host and path not in _HEALTH and not self.knows(host):
            return APIError(
                403,
                f"this server has no API key and does not know itself as {host[:200]!r}: start it with "
                f"--allowed-hosts {name_of(host[:200]) or 'NAME'}, or with --api-key",
                code="unknown_host",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        # What the browser itself says of pages of this server, also where a proxy changed Host.
        if not origin or path in _HEALTH or headers.get(b"sec-fetch-site") == b"same-origin":
            return None
        if self.is_own(origin, host):
            return None
        return APIError(
            403,
            f"this server has no API key and does not answer pages of {origin[:200]!r}: start it with "
            "--allowed-origins ORIGIN, or with --api-key",
            code="foreign_origin",
        )


_HEALTH = frozenset({"/health", "/ping"})


def check_hosts(names: Iterable[str]) -> None:
    """Raises ConfigError for what is no name of a host."""
    for name in names:
        bare = name.removeprefix("*.") if name != "*" else "any"
        if not bare or "*" in bare or "/" in bare or (":" in bare and not _is_address(bare)):
            raise ConfigError(
                f"allowed_hosts: expected names without port, such as llm.example.com or *.example.com, got {name!r}"
            )


def name_of(host: str) -> str | None:
    """The name in a ``Host`` header, in lower case and without port, brackets and a final dot; None: there is none."""
    try:
        parts = urlsplit(f"//{host.strip()}")
        _ = parts.port
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return (parts.hostname or "").removesuffix(".") or None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(bound: str) -> bool:
    if _is_address(bound):
        return ipaddress.ip_address(bound).is_loopback
    return bound.lower() == "localhost" or bound.lower().endswith(".localhost")
