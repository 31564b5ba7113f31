"""Ranks that supervisors start, without Ray: supervisors of this process, each as if on a machine of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.native import native_or_skip

from draftwise.cluster import remote, supervisor
from draftwise.cluster.group import Holding, RankGroup
from draftwise.cluster.messages import Order, Start
from draftwise.cluster.remote import Gone, Hand, Where, start_remote
from draftwise.cluster.supervisor import Supervisor, versions
from draftwise.errors import ConfigError, EngineDeadError
from draftwise.kernels.cpu.ranks import shared_bytes
from draftwise.types import StepPlan

MODULE = "tests.fakes.echoing_rank"


def execute(number: int) -> Order:
    return Order(number, "execute", StepPlan(step=number, rows=()))


class LocalHand(Hand):
    """Calls a supervisor in a thread."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.address = "127.0.0.1"
        self.supervisor = Supervisor()
        self.dead = False

    def begin(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        found: dict[str, Any] = {}

        def run() -> None:
            if self.dead:
                return
            try:
                found["answer"] = getattr(self.supervisor, method)(*arguments)
            except Exception as error:
                found["error"] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def answer(seconds: float) -> Any:
            if self.dead:
                raise Gone("went away")
            thread.join(seconds)
            if thread.is_alive():
                raise Gone("does not answer")
            if "error" in found:
                raise found["error"]
            return found["answer"]

        return answer


class Kept(Holding):
    def __init__(self, hands: list[LocalHand]) -> None:
        self._hands = hands
        self.put_away_times = 0

    def put_away(self) -> None:
        self.put_away_times += 1
        for hand in self._hands:
            hand.supervisor.close()


def begin(
    machines: list[str], seconds: float = 30.0, **options: Any
) -> tuple[RankGroup, list[LocalHand], Kept]:
    native_or_skip()
    hands = [LocalHand(machine) for machine in machines]
    kept = Kept(hands)

    def start(where: Where) -> Start:
        files = where.descriptors
        return Start(
            rank=where.rank, size=len(hands), seconds=seconds, meeting=None, memory=files.memory,
            sockets=files.sockets, device="cpu", log_level=40, methods=(), setting=where.threads,
        )  # fmt: skip

    size = shared_bytes(len(hands))
    group = start_remote(
        MODULE, hands, kept, start, host="127.0.0.1", threads=2, seconds=seconds, memory_bytes=size, **options
    )
    return group, hands, kept


@pytest.fixture
def group() -> Iterator[tuple[RankGroup, list[LocalHand], Kept]]:
    made = begin(["a", "a", "b"])
    yield made
    made[0].close()
    assert made[2].put_away_times == 1


def test_ranks_of_two_machines_meet_and_are_ended(group: tuple[RankGroup, list[LocalHand], Kept]) -> None:
    ranks, hands, _ = group
    assert ranks.first_answer() == [6.0, 2]  # the sum over ranks 1 + 2 + 3, and the threads
    answers = ranks.ask(execute)
    assert answers[0].result is not None and answers[0].result.rows[0].token_ids == (6,)
    assert len({answer.digest for answer in answers}) == 1
    assert [hand.call("posted") for hand in hands] == [2, 2, 2]
    assert ranks.failure is None
    ranks.close()
    assert all(hand.supervisor.end(0.0) for hand in hands)
    with pytest.raises(EngineDeadError, match="closed"):
        ranks.ask(execute)


def test_a_rank_that_dies_or_whose_supervisor_does_is_named(
    group: tuple[RankGroup, list[LocalHand], Kept],
) -> None:
    ranks, hands, _ = group
    ranks.first_answer()
    hands[1].supervisor.kill()
    with pytest.raises(EngineDeadError, match="rank 1 was ended by SIGKILL"):
        while True:
            ranks.ask(execute)
    assert str(ranks.failure).startswith("rank 1 was ended by SIGKILL")
    assert all(hand.supervisor.end(5.0) for hand in hands), "the others were ended with it"


def test_machines_with_other_versions_are_refused() -> None:
    other = versions() | {"torch": "1.0"}
    with pytest.raises(ConfigError, match=r"node 127\.0\.0\.1 has torch .*, not 1\.0 as here"):
        begin(["a", "b"], own_versions=other)


def test_machines_that_do_not_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Supervisor.begin

    def late(self: Supervisor, place: supervisor.Place) -> supervisor.Descriptors:
        if place.rank == 1:
            raise ConnectionRefusedError("nobody is there")
        return real(self, place)

    monkeypatch.setattr(Supervisor, "begin", late)
    with pytest.raises(ConfigError, match=r"rank [01] could not meet the others"):
        begin(["a", "b"], seconds=0.5)


def test_a_supervisor_that_has_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = remote._check_versions

    def check(own: Any, hands: Any, told: Any) -> None:
        real(own, hands, told)
        hands[1].dead = True

    monkeypatch.setattr(remote, "_check_versions", check)
    with pytest.raises(EngineDeadError, match="a rank went away"):
        begin(["a", "b"])
