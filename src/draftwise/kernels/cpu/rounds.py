"""Several rounds of decoding in one native call (``csrc/rounds.h``): what it is told, and what it answers."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from draftwise.kernels.cpu.book_drafts import STREAM_OF, BookDrafts, BookRecord, Kind
from draftwise.kernels.cpu.chains import ChainOutput
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.medusa import MedusaRecord, NativeMedusa
from draftwise.kernels.cpu.pass_records import PassInput
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.records import check_record
from draftwise.kernels.cpu.trees import TreeOutput

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64

_NGRAMS, _SUFFIXES = range(1, 3)
"""``dw::RoundLookUp``."""
_CHAINS, _TREES, _GUESSES, _ELSEWHERE = range(1, 5)
"""``dw::RoundDrafter``."""


class SlotPool(ctypes.Structure):
    """``dw::SlotPool``."""

    _fields_ = (("at", _PTR), ("layers", _I64), ("layer_bytes", _I64), ("slots", _I64), ("slot_bytes", _I64))


class GuessesRecord(ctypes.Structure):
    """``dw::Guesses``."""

    _fields_ = (
        ("layers", ctypes.POINTER(MedusaRecord)),
        ("budgets", _PTR),
        ("max_len", _I64),
        ("stream", _I64),
        ("target_ids", _PTR),
        ("q", _PTR),
        ("tree", _PTR),
        ("nodes", _I64),
        ("method", _I64),
    )


class RoundsRecord(ctypes.Structure):
    """``dw::Rounds``."""

    _fields_ = (
        ("requests", _I64),
        ("books", _PTR),
        ("block_size", _I64),
        ("rounds", _I64),
        ("most_ns", _I64),
        ("hurry", _PTR),
        ("most_nodes", _I64),
        ("wanted", _PTR),
        ("cuts", _PTR),
        ("outcomes", _PTR),
        ("program", _PTR),
        ("passes", ctypes.POINTER(PassInput)),
        ("room", _I64),
        ("logits", _PTR),
        ("vocab", _I64),
        ("pools", _PTR),
        ("num_pools", _I64),
        ("look_up", _I64),
        ("drafter", _I64),
        ("budgets", _PTR),
        ("once", _PTR),
        ("method", _I64),
        ("shortest", _I64),
        ("indexes", _PTR),
        ("global_", _PTR),
        ("outputs", _PTR),
        ("limits", _PTR),
        ("drafting", _PTR),
        ("draft_pass", ctypes.POINTER(PassInput)),
        ("chains", ctypes.POINTER(ChainOutput)),
        ("trees", ctypes.POINTER(TreeOutput)),
        ("guesses", _PTR),
        ("ask", ctypes.POINTER(BookRecord)),
        ("target_ids", _PTR),
        ("draft_vocab", _I64),
        ("drawn", _PTR),
        ("told", _PTR),
        ("sources", _PTR),
        ("num_sources", _I64),
        ("source_bytes", _I64),
        ("join", _PTR),
        ("join_width", _I64),
        ("features", _PTR),
        ("first_half", _I64),
        ("feature_bytes", _I64),
        ("feature_room", _I64),
        ("counts", _PTR),
        ("kept", _PTR),
        ("kept_bytes", _I64),
        ("num_kept", _I64),
        ("numbers", _PTR),
        ("tokens", _PTR),
        ("nodes", _PTR),
        ("paths", _PTR),
        ("sizes", _PTR),
        ("going", _PTR),
        ("done", _I64),
        ("drafted", _I64),
        ("feature_rows", _I64),
        ("forward_ns", _I64),
        ("verify_ns", _I64),
        ("draft_ns", _I64),
        ("steady_ns", _I64),
    )


_NAMES_IN_C = {"passes": "pass", "global_": "global"}


class RoundsCall:
    """The call."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        """Raises ConfigError if the library lays the record out in another way."""
        check_record(library, "Rounds", RoundsRecord, _NAMES_IN_C)
        check_record(library, "Guesses", GuessesRecord)
        self._run = library.function("dw_rounds", None, [_PTR, ctypes.POINTER(RoundsRecord)])
        self._pool = pool

    def run(self, record: RoundsRecord) -> None:
        """Compute the rounds; the record has the answers."""
        self._run(self._pool.pointer, record)


class RoundDrafts(ABC):
    """How native code drafts for some requests behind each round."""

    __slots__ = ()

    computes: ClassVar[bool] = False
    """Whether a model does."""

    stops: ClassVar[bool] = False
    """Whether it may stop drafting for some of them behind the first round (`RoundCuts.once`)."""

    @property
    def told(self) -> Tensor | None:
        """[n, V] float32: what drafts are drawn from, to which the books point; None: they are point masses."""
        return None

    @abstractmethod
    def tell(self, record: RoundsRecord) -> None:
        """Write down how. What it points to is kept by this object."""


class RoundElsewhere(RoundDrafts):
    """Python drafts: there is one round."""

    def tell(self, record: RoundsRecord) -> None:
        record.drafter = _ELSEWHERE


class RoundNgrams(RoundDrafts):
    """Look-ups of n-grams, each request in an index of its own."""

    stops = True

    def __init__(self, method: int, indexes: Sequence[int]) -> None:
        """``method``: number of its name; ``indexes`` [R]: handles."""
        self._method, self._indexes = method, array("q", indexes)

    def tell(self, record: RoundsRecord) -> None:
        record.look_up, record.method = _NGRAMS, self._method
        record.indexes = self._indexes.buffer_info()[0]


class RoundSuffixes(RoundDrafts):
    """Look-ups in suffix trees: the request's own, and that of all outputs."""

    stops = True

    def __init__(
        self,
        method: int,
        trees: Sequence[int],
        global_: int | None,
        outputs: Sequence[int],
        limits: ctypes.Structure,
    ) -> None:
        """``method``: number of its name; ``trees`` [R]: handles; ``outputs`` [R]: the sequence of each in ``global_``,
        -1: none; ``limits``: ``dw::SuffixLimits``."""
        self._method = method
        self._trees, self._outputs = array("q", trees), array("q", outputs)
        self._global, self._limits = global_, limits

    def tell(self, record: RoundsRecord) -> None:
        record.look_up, record.method = _SUFFIXES, self._method
        record.indexes = self._trees.buffer_info()[0]
        record.global_, record.outputs = self._global, self._outputs.buffer_info()[0]
        record.limits = ctypes.addressof(self._limits)


@dataclass(frozen=True, slots=True)
class RoundPasses(RoundDrafts):
    """Passes of a draft model or of a head, see `BookPasses.for_rounds`.

    ``drawn`` [n, Vd] and ``q`` [n, V] float32: what drafts are drawn from, and the same over the target's
    vocabulary; None: they are point masses. ``target_ids`` int64 [Vd]: see `HeadModel.target_ids`. ``kept``: what the
    others point to.
    """

    program: int
    draft_pass: PassInput
    out: ChainOutput | TreeOutput
    asked: BookDrafts
    drawn: Tensor | None
    q: Tensor | None
    target_ids: Tensor | None
    kept: object

    computes = True

    @property
    def told(self) -> Tensor | None:
        return self.q

    def tell(self, record: RoundsRecord) -> None:
        record.drafting, record.draft_pass = self.program, ctypes.pointer(self.draft_pass)
        record.ask = ctypes.pointer(self.asked.record)
        if isinstance(self.out, TreeOutput):
            record.drafter, record.trees = _TREES, ctypes.pointer(self.out)
            return
        record.drafter, record.chains = _CHAINS, ctypes.pointer(self.out)
        if self.drawn is None or self.q is None:
            return
        record.drawn, record.told = self.drawn.data_ptr(), self.q.data_ptr()
        record.draft_vocab = self.drawn.shape[1]
        record.target_ids = None if self.target_ids is None else self.target_ids.data_ptr()


class RoundGuesses(RoundDrafts):
    """Chains of Medusa's heads, or static trees of their likeliest tokens."""

    computes = True

    def __init__(
        self,
        heads: NativeMedusa,
        budgets: array[int],
        kind: Kind,
        *,
        method: int,
        max_len: int,
        target_ids: Tensor | None,
        tree: tuple[Sequence[int], Sequence[int]] | None,
    ) -> None:
        """What all requests have in common, and how much each wants.

        Args:
            heads: those that draft.
            budgets: [R] drafts of each, at most.
            kind: how chains are drawn; if "sampled", over the target's tokens.
            method: the number of its name.
            max_len: no draft stands at this position or behind it.
            target_ids: int64 [Vd], the token that each drawn id stands for; None: itself.
            tree: parents and ranks; None: they want chains.
        """
        nodes = None if tree is None else array("i", [*tree[0], *tree[1]])
        self._kept = heads, budgets, target_ids, nodes
        self._q: Tensor | None = None
        if kind == "sampled":
            self._q = torch.empty((len(budgets) * heads.num_heads, heads.vocab_size), dtype=torch.float32)
        self._record = GuessesRecord(
            layers=ctypes.pointer(heads.record),
            budgets=budgets.buffer_info()[0],
            max_len=max_len,
            stream=STREAM_OF[kind],
            target_ids=None if target_ids is None else target_ids.data_ptr(),
            q=None if self._q is None else self._q.data_ptr(),
            tree=None if nodes is None else nodes.buffer_info()[0],
            nodes=0 if nodes is None else len(nodes) // 2,
            method=method,
        )

    @property
    def told(self) -> Tensor | None:
        return self._q

    def tell(self, record: RoundsRecord) -> None:
        record.drafter, record.guesses = _GUESSES, ctypes.addressof(self._record)


@dataclass(frozen=True, slots=True)
class RoundHybrid(RoundDrafts):
    """A look-up, and a model for those of whom it found no match of ``shortest`` tokens."""

    found: RoundDrafts
    drafts: RoundDrafts
    shortest: int

    computes = True

    @property
    def told(self) -> Tensor | None:
        return self.drafts.told

    def tell(self, record: RoundsRecord) -> None:
        self.found.tell(record)
        self.drafts.tell(record)
        record.shortest = self.shortest


@dataclass(frozen=True, slots=True)
class FeatureJoin:
    """How a head's features are made of the target's results: hidden states entering ``layers``, side by side, through
    ``weight``. ``layers`` None: they are the rows after the target's last norm."""

    layers: tuple[int, ...] | None = None
    weight: NativeLinear | None = None


@dataclass(slots=True)
class RoundFeatures:
    """Where the features of a head come from and go to.

    ``values`` [2, n, F]: of the rows that became final, halves in turns; ``first``: the half that the first round
    writes; ``counts`` [R] int32: how many of each request; ``blocks`` [blocks, depths, F]: where those of blocks' last
    tokens are kept; None: nowhere.
    """

    join: FeatureJoin
    values: Tensor
    counts: array[int]
    blocks: Tensor | None
    first: int = 0
    _sources: Sequence[Tensor] | None = field(default=None, init=False)
    _places: object = field(default=None, init=False)
    _numbers: Sequence[tuple[str, int | None]] = field(default=(), init=False)

    def tell(self, record: RoundsRecord, sources: Sequence[Tensor]) -> None:
        """Write it down. ``sources`` [n, H] each: results of the target's pass, in the order of the join's layers."""
        if sources is not self._sources:
            self._sources, self._numbers = sources, self._numbers_of(sources)
        for name, number in self._numbers:
            setattr(record, name, number)
        record.first_half, record.counts = self.first, self.counts.buffer_info()[0]

    def _numbers_of(self, sources: Sequence[Tensor]) -> Sequence[tuple[str, int | None]]:
        """What stays the same as long as these are the sources."""
        places = self._places = (_PTR * len(sources))(*[source.data_ptr() for source in sources])
        first, size, weight, blocks = sources[0], self.values.element_size(), self.join.weight, self.blocks
        return (
            ("sources", ctypes.addressof(places)),
            ("num_sources", len(sources)),
            ("source_bytes", first.shape[1] * first.element_size()),
            ("join", None if weight is None else weight.pointer),
            ("join_width", 0 if weight is None else first.shape[1]),
            ("features", self.values.data_ptr()),
            ("feature_bytes", self.values.shape[2] * size),
            ("feature_room", self.values.shape[1]),
            ("kept", None if blocks is None else blocks.data_ptr()),
            ("kept_bytes", 0 if blocks is None else blocks.stride(0) * size),
            ("num_kept", 0 if blocks is None else blocks.shape[0]),
        )


def fits(join: FeatureJoin, sources: Sequence[Tensor], width: int, dtype: torch.dtype) -> bool:
    """Whether features of ``width`` numbers come out of these results."""
    if any(source.dtype is not dtype or source.shape[1] != sources[0].shape[1] for source in sources):
        return False
    weight = join.weight
    if weight is None:
        return len(sources) == 1 and sources[0].shape[1] == width
    given = sum(source.shape[1] for source in sources)
    return weight.dtype is dtype and weight.outputs == width and weight.inputs == given
