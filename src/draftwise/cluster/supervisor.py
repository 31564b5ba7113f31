"""Beside a rank on another machine: starts its process there, hears it, and ends it. The host calls its methods.

The rank's process is the same as on the host's own machine (`ranking`). It speaks with the host over a connection of
its own, so that a step does not pass through here, and ends when this process does.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import mmap
import os
import platform
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftwise.cluster.children import Child, Lifeline
from draftwise.cluster.processes import posted
from draftwise.cluster.sockets import Address, accept, connect, family_of, listen
from draftwise.cpus import processors
from draftwise.errors import ConfigError

_EQUAL = ("torch", "numpy", "transformers", "safetensors", "tokenizers")
"""Packages whose versions must be the same on all machines of an engine."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """A supervisor's facts about its machine."""

    address: Address  # where other ranks find its rank
    free_port: int  # of the machine, a moment ago
    versions: Mapping[str, str]
    threads: int  # that the machine can keep busy


@dataclass(frozen=True, slots=True)
class Place:
    """The settings that a rank is started with."""

    rank: int
    module: str  # see `ranking`
    host: Address  # where the engine listens
    peers: tuple[Address | None, ...]  # by rank; None: on the same machine, or itself
    secret: bytes
    memory: str | None  # the file that ranks of the machine share
    environment: Mapping[str, str]  # variables that it has unless the machine has them
    threads: int
    seconds: float  # that meeting the others may take


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Files of the rank's process, as its `Start` names them."""

    memory: int | None
    sockets: tuple[int, ...] | None


def versions() -> dict[str, str]:
    """Facts that must be the same on all machines of an engine, because ranks exchange pickled objects, and rows of
    equal bits."""
    from draftwise.kernels.cpu.library import native_library

    own = f"{importlib.metadata.version('draftwise')} ({_sources()})"
    found = {"python": platform.python_version(), "draftwise": own}
    for name in _EQUAL:
        found[name] = importlib.metadata.version(name)
    try:
        found["native kernels"] = "none" if native_library() is None else "built"
    except ConfigError as error:
        found["native kernels"] = str(error)
    found["processor"] = platform.machine()
    return found


def _sources() -> str:
    """A digest of the package's own code."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.cpp"), *root.rglob("*.h")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Supervisor:
    """The supervisor of one rank. Its arguments and results can be pickled."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._process: Child | None = None
        self._rank = 0
        self._lifeline: Lifeline | None = None  # closed by the system when this process ends
        self._memory: mmap.mmap | None = None

    def introduce(self, host: str) -> Introduction:
        """Listen on an address of this machine."""
        self._listener = listen(host)
        with socket.socket(family_of(host)) as other:
            other.bind((host, 0))
            free = other.getsockname()[1]
        address = (host, self._listener.getsockname()[1])
        return Introduction(address, free, versions(), processors().threads)

    def make_memory(self, nbytes: int) -> str:
        """A file of so many zeros in memory, for ranks of this machine; `forget_memory` removes its name."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, path = tempfile.mkstemp(prefix="draftwise-ranks-", dir=folder)
        try:
            os.ftruncate(descriptor, nbytes)
        finally:
            os.close(descriptor)
        return path

    def forget_memory(self, path: str) -> None:
        """All ranks have opened it: nothing stays behind, however they end."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def begin(self, place: Place) -> Descriptors:
        """Meet the other ranks and start the process. Raises OSError if a rank cannot be reached."""
        assert self._listener is not None, "introduced"
        opened = contextlib.ExitStack()
        with opened:
            opened.enter_context(self._listener)
            links = self._meet(place, opened)
            channel = opened.enter_context(connect(place.host, place.secret, place.rank, place.seconds))
            self._lifeline = Lifeline()
            memory = None
            if place.memory is not None:
                memory = os.open(place.memory, os.O_RDWR)
                opened.callback(os.close, memory)
                self._memory = mmap.mmap(memory, 0)
            sockets = tuple(links[r].fileno() if r in links else -1 for r in range(len(place.peers)))
            inherited = [one for one in (*sockets, memory) if one is not None and one >= 0]
            own = {name: value for name, value in place.environment.items() if name not in os.environ}
            threads = {"OMP_NUM_THREADS": str(place.threads)}  # Ray sets it to what was reserved
            self._rank = place.rank
            self._process = Child(
                f"rank {place.rank}",
                place.module,
                (channel.fileno(), self._lifeline.children_end),
                inherited=inherited,
                environment=own | threads,
            )
            return Descriptors(memory, sockets if links else None)

    def _meet(self, place: Place, opened: contextlib.ExitStack) -> dict[int, socket.socket]:
        """Connections to ranks on other machines: a rank connects to those before it and is met by those after it."""
        assert self._listener is not None
        found: dict[int, socket.socket] = {}
        for rank, peer in enumerate(place.peers):
            if peer is not None and rank < place.rank:
                found[rank] = opened.enter_context(connect(peer, place.secret, place.rank, place.seconds))
        later = {r for r, peer in enumerate(place.peers) if peer is not None and r > place.rank}
        if later:
            met = accept(self._listener, place.secret, later, place.seconds)
            found |= {rank: opened.enter_context(one) for rank, one in met.items()}
        return found

    def end(self, seconds: float) -> str | None:
        """How the process ended, for people; None: it has not within this time."""
        if self._process is None:
            return "was not started"
        return self._process.how if self._process.wait(seconds) else None

    def said(self) -> list[str]:
        """The last lines that it wrote."""
        return [] if self._process is None else self._process.said()

    def posted(self) -> int:
        """Exchanges that the rank has begun; 0 if they do not go through memory."""
        if self._memory is None or self._process is None:
            return 0
        return posted(self._memory, self._rank)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Hold nothing any more; the rank's process ends, if it has not."""
        if self._listener is not None:
            self._listener.close()
        if self._lifeline is not None:
            self._lifeline.let_go()
        self._lifeline = None

    def process_ids(self) -> tuple[int, int | None]:
        """The ids of this process and of the rank's."""
        return os.getpid(), None if self._process is None else self._process.pid


def variables() -> dict[str, str]:
    """Variables of this process's environment that ranks on other machines should have, too."""
    names = ("DRAFTWISE_", "HF_", "HUGGING_FACE_")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}
