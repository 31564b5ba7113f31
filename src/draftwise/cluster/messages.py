"""Messages between the host's process and the ranks', pickled, one at a time."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from draftwise.errors import DraftwiseError
from draftwise.models.lora.low_rank import LowRank
from draftwise.types import RowResult, StepPlan, StepResult

Call = Literal["execute", "forget", "check_adapter", "load_adapter", "drop_adapter", "close"]


class Order(NamedTuple):
    """To all ranks alike. ``number`` rises by one with each."""

    number: int
    call: Call
    plan: StepPlan | None = None
    slot: int = 0  # of an adapter
    adapter: Mapping[str, LowRank] | None = None


class Answer(NamedTuple):
    """The answer of one rank. ``result``: of rank 0 alone. ``digest``: of the results that all ranks must share."""

    number: int
    digest: int = 0
    result: StepResult | None = None
    error: BaseException | None = None
    trace: str = ""  # of the error
    refusal: DraftwiseError | None = None  # of the order, which changed nothing: the rank goes on


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what a rank is made of. ``setting``: for `cluster.ranking.Work`, whatever it is made of."""

    rank: int
    size: int
    seconds: float  # that a rank waits for another
    meeting: str | None  # where torch.distributed meets; None: memory is shared
    memory: int | None  # file descriptor of the memory that ranks of a machine share
    sockets: (
        tuple[int, ...] | None
    )  # by rank: connected to one on another machine, or -1; None: all are on one
    device: str  # what torch.distributed exchanges tensors of
    log_level: int
    methods: tuple[tuple[str, str], ...]  # that third parties registered, and where their classes are
    setting: Any


def digest(rows: Sequence[RowResult]) -> int:
    """A digest of a step's decisions, which must be the same on all ranks. Times and texts of errors may differ."""
    decided = [
        (row.rid, row.token_ids, row.accepted_nodes, row.draft_tokens, row.num_proposed, row.error is None)
        for row in rows
    ]
    return zlib.crc32(repr(decided).encode())


def send(channel: Connection, message: object) -> None:
    """Raises OSError if the other side is gone."""
    channel.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(channel: Connection) -> Any:
    """Raises EOFError or OSError if the other side is gone."""
    return pickle.loads(channel.recv_bytes())
