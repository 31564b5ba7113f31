"""Connections between machines: TCP, each opened with a secret that all sides were given beforehand.

The secret keeps strangers from being taken for a rank; what comes behind it is pickled. It does not hide anything: the
network between the machines of a cluster is taken to be one's own, as Ray and torch.distributed take it.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Collection

Address = tuple[str, int]

SECRET_BYTES = 32
_HELLO = struct.Struct(f"!{SECRET_BYTES}sI")  # secret, rank
_STRANGER = 5.0
"""Seconds in which a new connection must identify itself."""


def listen(host: str) -> socket.socket:
    """A socket on any free port of an address of this machine. Raises OSError if it has no such address."""
    return socket.create_server((host, 0), family=family_of(host))


def family_of(host: str) -> socket.AddressFamily:
    """The family of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def connect(address: Address, secret: bytes, rank: int, seconds: float) -> socket.socket:
    """Connect and identify as ``rank``. Raises OSError if nothing listens there."""
    made = socket.create_connection(address, timeout=seconds)
    try:
        made.sendall(_HELLO.pack(secret, rank))
    except BaseException:
        made.close()
        raise
    return _ready(made)


def accept(
    listener: socket.socket, secret: bytes, ranks: Collection[int], seconds: float
) -> dict[int, socket.socket]:
    """Wait until all of ``ranks`` have connected. Connections that do not know the secret are closed.

    Raises:
        TimeoutError: they have not within this time.
    """
    deadline = time.monotonic() + seconds
    found: dict[int, socket.socket] = {}
    try:
        while len(found) < len(ranks):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            one, _ = listener.accept()
            rank = _told(one, secret, min(_STRANGER, max(0.001, deadline - time.monotonic())))
            if rank is None or rank not in ranks or rank in found:
                one.close()
            else:
                found[rank] = _ready(one)
    except BaseException:
        for one in found.values():
            one.close()
        raise
    return found


def has_ended(descriptor: int) -> bool:
    """Whether the other side of a connection has closed it, or is not there any more. Reads nothing."""
    try:
        with socket.socket(fileno=descriptor) as looked:
            try:
                return looked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except (BlockingIOError, InterruptedError):
                return False
            finally:
                looked.detach()
    except OSError:
        return True


def _told(one: socket.socket, secret: bytes, seconds: float) -> int | None:
    """The rank that a connection identifies as; None: it does not know the secret."""
    deadline, data = time.monotonic() + seconds, b""
    try:
        while len(data) < _HELLO.size:
            one.settimeout(max(0.001, deadline - time.monotonic()))
            more = one.recv(_HELLO.size - len(data))
            if not more:
                return None
            data += more
    except OSError:
        return None
    told, rank = _HELLO.unpack(data)
    return int(rank) if hmac.compare_digest(told, secret) else None


def _ready(one: socket.socket) -> socket.socket:
    """Blocking, without delay, and noticing within about a minute that the other machine is gone."""
    one.settimeout(None)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return one
