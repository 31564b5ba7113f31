"""Takes the address before the model is loaded, so that an error shows at once."""

from __future__ import annotations

import socket
import ssl

from draftwise.errors import ConfigError, shown


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the engine is ready, connections are refused.

    Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except UnicodeError:  # of the encoding of names: a part of it is empty or too long
        raise ConfigError(f"cannot listen at {shown(host)}: that is no name of a host") from None
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    return bound


def check_tls(keyfile: str | None, certfile: str | None, ca_certs: str | None) -> None:
    """Raises ConfigError for files that are no key and certificate, before anything is loaded."""
    if certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    fields = "ssl_keyfile, ssl_certfile"
    try:
        context.load_cert_chain(certfile, keyfile)
        if ca_certs is not None:
            fields = "ssl_ca_certs"
            context.load_verify_locations(ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{fields}: {error.strerror or error}") from None
