"""The data of seats on the device: a row for each request, and the columns of these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftwise.graphs.plans import distribution_rows
from draftwise.kernels.walk import Walk
from draftwise.sampling.noise import signed_word
from draftwise.types import TreeShape

# columns of the state
KNOWN = 0  # tokens of the request, the root included
ROOT = 1  # the last of them
WAITING = 2  # drafts behind it
FED = 3  # leading tokens whose K/V the drafter has
STORED = 4  # drafts behind these whose K/V it has, too
SEED = 5  # a signed word
SAMPLE = 6
TEMPERATURE = 7  # the bits of a float64
RULE = 8  # place in RULES
FIRST_KEY = 9  # that its drafter looks at
TOP_K = 10  # of `Shaping`; 0: all
TOP_P = 11  # the bits of float64 from here on
LOG_MIN_P = 12
PRESENCE = 13
FREQUENCY = 14
REPETITION = 15
SOURCE = 16  # number of the memory with what the waiting drafts were drawn from; 0: they are point masses
ADAPTER = 17  # the place of its adapter in `StackedAdditions`; 0: none
STATE = 18  # the drafts follow

# columns of what a step is told
LIMIT = 0  # tokens at which the request ends; 0: it takes no part
NODES = 1  # drafts to verify, at most
BUDGET = 2  # to make
LOOP = 3  # number of the draft loop that makes them; 0: none
LOOK = 4  # number of the look-up whose drafts go before the loop's; 0: none
TOLD = 5  # numbers of pages of the block table follow, and then their blocks

# columns of what a step answers
RAN = 0  # 1: it took part; 2: and a look-up has found the new drafts
VERIFIED = 1  # drafts
ACCEPTED = 2
ANSWERED_KNOWN = 3  # KNOWN, WAITING and FED after it
ANSWERED_WAITING = 4
ANSWERED_FED = 5
ANSWER = 6
"""Here follow the committed tokens [K + 1], the new drafts [K], the accepted path [K], and the new drafts' parents [K],
the latter of dynamic trees alone."""

RULES: Final = (
    "greedy",
    "coupled",
    "rejection",
    "block",
    "synthetic",
    "synthetic_sampled",
    "typical",
    "typical_sampled",
)
"""How requests are verified. ``greedy``: also those of the next three at temperature 0. ``synthetic``, ``typical``: the
last token is the most likely one; ``.._sampled``: it is drawn."""


def pages_of_step(drafts: int, block_size: int) -> int:
    """Most blocks that one plan may add to a request that verifies, and makes, up to ``drafts`` drafts, while another
    step of the kind is on its way: three times the drafts, and two roots.

    Example: 5 drafts, blocks of 16: 17 tokens more than are committed touch up to 3 blocks.
    """
    return -(-(3 * drafts + 2) // block_size) + 1


def seats_bytes(seats: int, drafts: int, vocab_size: int, max_len: int) -> int:
    """Bytes on the device that seats may take, about: the target's distributions of all rows, while they are verified,
    those of the drafts, and texts of up to ``max_len`` tokens."""
    return 4 * seats * (vocab_size * (2 * drafts + 1) + max_len)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the memory: seats S, most drafts K of a request, blocks of a table, tokens in a block, vocabulary V.

    ``loops`` is the highest number of a draft loop. ``texts`` says whether somebody looks up in the tokens, ``past``
    how many tokens of requests that have ended are looked at, too.
    """

    seats: int
    drafts: int
    table_width: int
    block_size: int
    vocab_size: int
    loops: int = 1
    texts: bool = False
    past: int = 0


class SeatMemory:
    """Tensors of S seats with up to K drafts each. They stay where they are, for graphs are captured on them.

    ``state`` [S, 18 + K] int64; ``tables`` [S, blocks] int32; ``told`` [S, 5 + 2 P] int64, what the host says of a
    step; ``now`` [S, 2] int64, of the step that runs: whether a seat takes part, and its drafts; ``walk``, of S + 1:
    what it commits (the last one is nobody's); ``answer`` [S, 6 + 4 K + 1] int64, what the host is told; ``text``
    [S, tokens of a table + 1] int32, all known tokens of whoever looks up in them; ``past`` [P] int32, outputs of
    requests that have ended, with -1 behind each; ``forms`` [loops + 1 + S, 5, K + 1] int64, how the drafts of a loop
    stand below a root: see `form_of`. ``own_forms`` are its last S ones, of the dynamic trees of seats.

    Every word has one writer: ``told`` the copy of a launch; ``state``, ``tables``, ``text`` and ``q`` the kernels of a
    step, and the host for a request that enters, between two steps; ``forms`` the host, once; ``own_forms`` as
    ``state``; the others the kernels of a step.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.limits = limits
        self.seats, self.drafts = limits.seats, limits.drafts
        self.block_size = limits.block_size
        self.pages = pages_of_step(limits.drafts, limits.block_size)
        self.device = device

        def words(width: int) -> Tensor:
            return torch.zeros((limits.seats, width), dtype=torch.int64, device=device)

        self.state = words(STATE + limits.drafts)
        self.state[:, KNOWN] = 1
        for column in (TEMPERATURE, TOP_P, REPETITION):
            self.number(column).fill_(1.0)
        self.tables = torch.zeros((limits.seats, limits.table_width), dtype=torch.int32, device=device)
        tokens = limits.table_width * limits.block_size if limits.texts else 0
        self.text = torch.zeros((limits.seats, tokens + 1), dtype=torch.int32, device=device)
        self.paths = words(limits.drafts + 1)
        """What look-ups have found that join trees: a length, and tokens."""
        self.past = torch.full((limits.past,), -1, dtype=torch.int32, device=device)
        self.told = words(TOLD + 2 * self.pages)
        self.now = words(2)
        self.answer = words(ANSWER + 4 * limits.drafts + 1)
        chain = form_of(range(-1, limits.drafts - 1), limits.drafts)
        self.forms = chain.repeat(limits.loops + 1 + limits.seats, 1, 1).to(device)
        self.shared_forms = limits.loops + 1
        self.own_forms = self.forms[self.shared_forms :]
        self.own_forms[:, 3, 0] = 1
        packed = torch.zeros((limits.seats + 1, 2 * limits.drafts + 2), dtype=torch.int32, device=device)
        self.walk = Walk(packed, limits.drafts)
        self.numbers = torch.arange(limits.seats, device=device)
        self.draft_places = torch.arange(limits.drafts, device=device)
        self.q: dict[int, Tensor] = {}
        """[S, draws, V] float32 over the target's vocabulary, by number of the source: what drafts were drawn from."""

    def set_form(self, number: int, tree: TreeShape | None) -> None:
        """Say how the drafts of a loop stand, which is else in a chain: in this tree, or in one that differs from
        request to request (None). Of the latter ``forms`` has a 2 in place of `form_of`'s 0 or 1, and the tree is that
        of the seat."""
        if tree is None:
            self.forms[number, 3, 0] = 2
        else:
            self.forms[number].copy_(form_of(tree.parents, self.drafts, distribution_rows(tree)))
            self.forms[number, 3, 0] = 1

    def forms_of(self, count: int) -> Tensor:
        """[R, 5, K + 1] of the drafts that wait in the first R seats."""
        loops, own = self.told[:count, LOOP], self.numbers[:count] + self.shared_forms
        return self.forms[torch.where(self.forms[loops, 3, 0] == 2, own, loops)]

    def branched(self, count: int) -> Tensor:
        """[R] whether the drafts that are verified of the first R seats are anything but a chain."""
        parents, draft = self.forms_of(count)[:, 2, 1:], self.draft_places
        return ((parents != draft - 1) & (draft < self.now[:count, 1:])).any(1)

    def committed_rows(self, count: int, width: int) -> Tensor:
        """[R, min(width, K + 1)] int64 rows of a request in a pass of ``width`` rows: of the root, then of the
        accepted path. Places behind it mean nothing, and are rows."""
        rows = torch.zeros((count, self.drafts + 1), dtype=torch.int64, device=self.device)
        rows[:, 1:].copy_(self.walk.paths[:count] + 1)
        return rows[:, :width].clamp(0, width - 1)

    @property
    def waiting_drafts(self) -> Tensor:
        """[S, K] int64"""
        return self.state[:, STATE:]

    def number(self, column: int) -> Tensor:
        """[S] float64 of a column that holds one's bits."""
        return self.state.view(torch.float64)[:, column]

    def open_source(self, number: int, draws: int) -> Tensor:
        """Memory for the ``draws`` distributions that one drafter's drafts of a request are drawn from."""
        if number not in self.q:
            shape = (self.seats, draws, self.limits.vocab_size)
            self.q[number] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return self.q[number]

    def move(self, old: int, new: int) -> None:
        """A request takes another seat."""
        for tensor in (self.state, self.own_forms, self.tables, self.text, *self.q.values()):
            tensor[new].copy_(tensor[old])


def form_of(parents: Sequence[int], drafts: int, drawn_from: Sequence[int] | None = None) -> Tensor:
    """How drafts stand below a root, [5, K + 1] int64 for up to K ``drafts``, of which ``parents`` are some.
    ``drawn_from``: their rows of q; None: each has its own.

    Five lists of the rows of a root and its drafts: depths; ancestors, a bit for each row, as
    `AttentionBatch.ancestors_np`; the draft that is a draft's parent, from the second place on; whether it is a tree,
    which attention has to be told, in the first place, 0 here; and the row of q that a draft was drawn from, from the
    second place on.

    Example: parents (-1, -1, 0) are depths 0 1 1 2, ancestors 1 3 5 11, parents - -1 -1 0, rows of q - 0 0 1.
    """
    depths, masks = [0], [1]
    for draft, parent in enumerate(parents):
        depths.append(depths[parent + 1] + 1)
        masks.append(masks[parent + 1] | 1 << (draft + 1))
    signed = [signed_word(mask & (1 << 64) - 1) for mask in masks]  # nobody reads those of longer chains
    drawn_from = range(len(parents)) if drawn_from is None else drawn_from
    form = torch.zeros((5, drafts + 1), dtype=torch.int64)
    for i, row in enumerate((depths, signed, [-1, *parents], [0], [0, *drawn_from])):
        form[i, : len(row)] = torch.tensor(row)
    return form
