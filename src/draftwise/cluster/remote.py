"""Ranks on other machines, each beside a `Supervisor` that the host calls through a `Hand`."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from draftwise.cluster.children import PATIENCE
from draftwise.cluster.group import Holding, RankGroup, RankHandle
from draftwise.cluster.messages import Start
from draftwise.cluster.sockets import SECRET_BYTES, accept, has_ended, listen
from draftwise.cluster.supervisor import Descriptors, Introduction, Place, variables, versions
from draftwise.errors import ConfigError, EngineDeadError

_CALL = 10.0
"""Seconds that a call of a supervisor may take which does nothing but look."""


class Gone(Exception):
    """A supervisor does not answer any more; the message says why, behind "rank 1 "."""


class Hand(ABC):
    """Calls the methods of one supervisor, wherever it is."""

    machine: str
    """A name of its machine: ranks with the same one share memory."""
    address: str
    """Where others reach it."""

    @abstractmethod
    def begin(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        """Begin a call. What is returned waits for the answer so many seconds, and raises `Gone`, or what the method
        raised."""

    def call(self, method: str, *arguments: Any, seconds: float = _CALL) -> Any:
        """Call and wait."""
        return self.begin(method, *arguments)(seconds)


class RemoteRank(RankHandle):
    """A rank that a supervisor has started."""

    def __init__(self, rank: int, channel: Connection, hand: Hand) -> None:
        super().__init__(rank, channel)
        self.hand = hand
        self._end: str | None = None  # how it ended, once that is known

    def gone(self) -> bool:
        return has_ended(self.channel.fileno())

    def end(self) -> str:
        self.wait(PATIENCE)
        return self._end or "closed its connection, and runs"

    def said(self) -> Sequence[str]:
        try:
            return list(self.hand.call("said"))
        except Gone:
            return []

    def posted(self) -> int:
        try:
            return int(self.hand.call("posted"))
        except Gone:
            return -1

    def kill(self) -> None:
        if self._end is None:
            self.hand.begin("kill")

    def wait(self, seconds: float) -> bool:
        if self._end is None:
            try:
                self._end = self.hand.call("end", seconds, seconds=seconds + _CALL)
            except Gone as error:
                self._end = str(error)
        return self._end is not None

    def disown(self) -> None:
        """Nothing of this process's waits for it."""


@dataclass(frozen=True, slots=True)
class Where:
    """The machine's part of a rank's `Start`."""

    rank: int
    machine: str
    threads: int
    descriptors: Descriptors
    meeting: str  # where torch.distributed can meet


def start_remote(
    module: str,
    hands: Sequence[Hand],
    holding: Holding,
    start: Callable[[Where], Start],
    *,
    host: str,
    threads: int | None,
    seconds: float,
    memory_bytes: int | None,
    own_versions: Mapping[str, str] | None = None,
) -> RankGroup:
    """Start one rank through each hand.

    Args:
        module: what each runs, see `ranking`.
        holding: put away at the end, and when this fails.
        start: what a rank is told first.
        host: this machine's address, as the others see it.
        threads: of each rank; None: the machine's, divided among its ranks.
        seconds: that an order may take, and that meeting may take.
        memory_bytes: of the memory that ranks of a machine share; None: they do not.
        own_versions: `versions` of this machine; given by tests.

    Raises:
        ConfigError: machines have unequal versions, or cannot reach each other.
        EngineDeadError: a supervisor has gone.
    """
    size = len(hands)
    files: dict[str, str] = {}
    try:
        told = _introductions(hands)
        _check_versions(own_versions or versions(), hands, told)
        secret = os.urandom(SECRET_BYTES)
        together = {hand.machine: [h.machine for h in hands].count(hand.machine) for hand in hands}
        counts = [
            threads or max(1, one.threads // together[h.machine]) for h, one in zip(hands, told, strict=True)
        ]
        if memory_bytes is not None:
            _make_memory(hands, memory_bytes, files)
        with listen(host) as listener:
            address = (host, listener.getsockname()[1])
            begun = []
            for rank, hand in enumerate(hands):
                peers = tuple(
                    None if other.machine == hand.machine or memory_bytes is None else told[r].address
                    for r, other in enumerate(hands)
                )
                place = Place(
                    rank, module, address, peers, secret, files.get(hand.machine), variables(), counts[rank], seconds
                )  # fmt: skip
                begun.append(hand.begin("begin", place))
            descriptors = [_answered(rank, one, seconds + _CALL) for rank, one in enumerate(begun)]
            channels = accept(listener, secret, range(size), seconds)
        _forget_memory(hands, files)
    except BaseException as error:
        with contextlib.suppress(Exception):
            _forget_memory(hands, files)
        holding.put_away()
        if isinstance(error, TimeoutError):
            raise ConfigError(
                f"the ranks' machines cannot reach this one at {host} within {seconds:g} s (worker_timeout)"
            ) from None
        if isinstance(error, Gone):
            raise EngineDeadError(f"a rank {error}") from None
        raise
    group = RankGroup(
        [RemoteRank(r, Connection(channels[r].detach()), hand) for r, hand in enumerate(hands)],
        holding,
        seconds=seconds,
    )
    meeting = f"tcp://{_shown(told[0].address[0])}:{told[0].free_port}"
    group.tell(lambda r: start(Where(r, hands[r].machine, counts[r], descriptors[r], meeting)))
    return group


def _introductions(hands: Sequence[Hand]) -> list[Introduction]:
    begun = [hand.begin("introduce", hand.address) for hand in hands]
    return [_answered(rank, one, 120.0) for rank, one in enumerate(begun)]


def _make_memory(hands: Sequence[Hand], nbytes: int, files: dict[str, str]) -> None:
    """Machine -> the file that its ranks share, made by its first rank."""
    for hand in hands:
        if hand.machine not in files:
            files[hand.machine] = hand.call("make_memory", nbytes)


def _forget_memory(hands: Sequence[Hand], files: dict[str, str]) -> None:
    """The files have no names any more."""
    for machine, path in files.items():
        next(hand for hand in hands if hand.machine == machine).call("forget_memory", path)
    files.clear()


def _answered(rank: int, one: Callable[[float], Any], seconds: float) -> Any:
    try:
        return one(seconds)
    except Gone as error:
        raise EngineDeadError(f"rank {rank} {error}") from None
    except OSError as error:
        raise ConfigError(f"rank {rank} could not meet the others: {error}") from None


def _check_versions(own: Mapping[str, str], hands: Sequence[Hand], told: Sequence[Introduction]) -> None:
    """Raise ConfigError if a machine has other versions than this one."""
    for hand, one in zip(hands, told, strict=True):
        unequal = [
            f"{name} {one.versions.get(name)}, not {version}"
            for name, version in own.items()
            if one.versions.get(name) != version
        ]
        if unequal:
            raise ConfigError(
                f"node {hand.address} has {'; '.join(unequal)} as here: all nodes of an engine need equal versions"
            )


def _shown(host: str) -> str:
    """An address in a URL."""
    return f"[{host}]" if ":" in host else host
