"""What resident steps work on: what a run keeps on the device (a row per slot, a slot per request), what a draft loop
reads and leaves behind, and how a run verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.kernels.walk import Walk

# columns of the state
KNOWN = 0  # tokens of the request, the root included
ROOT = 1  # the last of them
WAITING = 2  # drafts behind it
FED = 3  # leading tokens whose K/V the drafter has
STORED = 4  # drafts behind these whose K/V it has, too
SEED = 5  # a signed word
SAMPLE = 6
TEMPERATURE = 7  # the bits of a float64
STATE = 8  # the drafts follow

# columns of what a step is told
LIMIT = 0  # tokens at which the request ends; 0: nobody is there
NODES = 1  # drafts to verify, at most
BUDGET = 2  # to make
TOLD = 3  # numbers of pages of the block table follow, and then their blocks

# columns of what a step answers
RAN = 0  # 1: somebody was there
VERIFIED = 1  # drafts
ACCEPTED = 2
ANSWERED_KNOWN = 3  # KNOWN, WAITING and FED after it
ANSWERED_WAITING = 4
ANSWERED_FED = 5
ANSWER = 6  # the committed tokens [K + 1] follow, and the new drafts [K]


def pages_of_step(drafts: int, block_size: int) -> int:
    """Most blocks that one plan may add to a request that verifies, and makes, up to ``drafts`` drafts, while another
    step of the kind is on its way: three times the drafts, and two roots.

    Example: 5 drafts, blocks of 16: 17 tokens more than are committed touch up to 3 blocks.
    """
    return -(-(3 * drafts + 2) // block_size) + 1


def resident_bytes(slots: int, drafts: int, vocab_size: int) -> int:
    """Bytes on the device that resident steps of so many slots may take, about: the target's distributions of all rows,
    while they are verified, and those of the drafts."""
    return 4 * vocab_size * slots * (2 * drafts + 1)


class ResidentMemory:
    """Tensors of S slots with up to K drafts each. They stay where they are, for graphs are captured on them.

    ``state`` [S, 8 + K] int64; ``told`` [S, 3 + 2 P] int64, what the host says of a step; ``now`` [S, 2] int64, of the
    step that runs: whether a slot takes part, and its drafts; ``walk``: what it commits; ``answer`` [S, 6 + 2 K + 1]
    int64, what the host is told; ``q`` [S, K, V] float32 over the target's vocabulary, of drafters that draw from a
    smaller one (else the loop's own memory is read).
    """

    def __init__(self, slots: int, drafts: int, block_size: int, device: torch.device) -> None:
        self.slots = slots
        self.drafts = drafts
        self.block_size = block_size
        self.pages = pages_of_step(drafts, block_size)

        def words(width: int) -> Tensor:
            return torch.zeros((slots, width), dtype=torch.int64, device=device)

        self.state = words(STATE + drafts)
        self.told = words(TOLD + 2 * self.pages)
        self.now = words(2)
        self.answer = words(ANSWER + 2 * drafts + 1)
        self.walk = Walk(torch.zeros((slots, 2 * drafts + 2), dtype=torch.int32, device=device), drafts)
        self.q: Tensor | None = None

    @property
    def waiting_drafts(self) -> Tensor:
        """[S, K] int64"""
        return self.state[:, STATE:]

    @property
    def temperatures(self) -> Tensor:
        """[S] float64"""
        return self.state.view(torch.float64)[:, TEMPERATURE]

    @property
    def live(self) -> Tensor:
        """[S] bool, in a step: which slots take part."""
        return self.now[:, 0].bool()


class LoopSeats(NamedTuple):
    """What a replay of a `ChainLoop` over R requests reads besides the rows of its first pass, and what it leaves
    behind, ``tokens`` and ``q``: for those who fill it in on the device."""

    last: Tensor  # [R] int64, row of the first pass from which each request drafts
    start: Tensor  # [R] int64, key of its first draft
    length: Tensor  # [R] int64, drafts that count
    noise: Tensor  # [R, steps] int64, `row_key` as signed words, or the bits of float64 uniforms
    features: Tensor | None  # [rows of the first pass, F] of heads
    tokens: Tensor  # [R, steps] int64
    q: Tensor | None  # [R, steps, Vd] float32; None: nothing is drawn from it


@dataclass(frozen=True, slots=True)
class ResidentRule:
    """How a run verifies. ``name``: ``greedy`` (also for the others at temperature 0), ``coupled``, ``rejection``,
    ``block`` or ``synthetic``.

    ``rates``: of rule ``synthetic``; ``sampled``: whether its last token is drawn, or the most likely one.
    """

    name: str
    rates: tuple[float, ...] = ()
    sampled: bool = False

    @property
    def draws(self) -> bool:
        """Whether distributions are drawn from."""
        return self.name in ("rejection", "block") or (self.name == "synthetic" and self.sampled)
