"""Suffix decoding: what followed the longest matches in this request and in past outputs (docs/algorithms/suffix.md).

Source: Oliaro, Jia, Campos, Qiao, *SuffixDecoding* (2411.04975), section 3.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from draftwise.errors import ConfigError
from draftwise.graphs.seats.lookup import LookUp
from draftwise.kernels.cpu.library import NativeLibrary, native_library, why_not_native
from draftwise.kernels.cpu.rounds import RoundDrafts
from draftwise.names import method_number
from draftwise.propose.base import DraftRow, Proposer, ProposerContext
from draftwise.propose.columns import (
    ColumnDrafter,
    ColumnLookUp,
    DraftBlock,
    DraftColumns,
    RoundDrafter,
    says_itself,
)
from draftwise.propose.lookup.suffix_engines import NativeEngine, PythonEngine, Tree
from draftwise.propose.lookup.suffix_native import NativeSuffixTree, suffix_functions
from draftwise.propose.lookup.suffix_python import PythonSuffixTree, SuffixLimits
from draftwise.types import EMPTY_PROPOSAL, IntArray, Proposal, chain

logger = logging.getLogger("draftwise")

MAX_DEPTH = 1024
"""Deepest tree: a token costs time in proportion."""
MAX_CACHED_TOKENS = 4_000_000
"""Tokens of past outputs, at most: under 400 MB."""
_MAX_CACHED_TOKENS_PYTHON = 20_000
"""The same without the native library, where a look-up takes time in proportion."""


@dataclass(slots=True)
class _Request:
    """A request that drafts. ``local``: all its tokens, in sequence 0; ``output``: its sequence in the global tree, or
    -1 if it has none (any more)."""

    local: Tree
    output: int
    num_prompt: int


@dataclass(frozen=True, slots=True)
class _Together:
    """What rounds of some requests are told, as long as none of them enters, leaves or loses its output. ``most``:
    tokens that they will have, at most."""

    rids: list[int]
    drafts: RoundDrafts
    most: int


class SuffixProposer(Proposer, ColumnDrafter, ColumnLookUp, RoundDrafter):
    """Drafts the likeliest continuation of the text's end, counted in the request's own tokens and in past outputs.

    For every length at which the end of the text occurred before, in the request (prompt and output) or in an output
    of the cache, what followed is walked: the most frequent token each time, as long as its probability (product of
    relative frequencies) is at least ``min_token_prob``, at most floor(length * ``max_spec_factor`` +
    ``max_spec_offset``) tokens. The draft with the highest sum of probabilities is proposed; of equal ones that of
    the longer match, then the request's own. So a draft is as long as its evidence is good, and empty where nothing
    repeats itself.

    Outputs enter the cache token by token and leave it, the oldest first, when there are more than
    ``max_cached_requests`` (0: no cache) or `MAX_CACHED_TOKENS` tokens. A request that was preempted goes on
    with the output it has there.

    ``tree``: propose the likeliest nodes as a tree instead of a chain, as a request's ``speculative_dynamic_tree`` does
    (whose limits are those of a model's passes: a look-up makes none, and goes by counts alone). A request's own
    ``speculative_token_tree`` is filled rank by rank in any case, as far as continuations are known.
    """

    name: ClassVar[str] = "suffix"
    evident: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True
    drafts_dynamic_trees: ClassVar[bool] = True

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        tree: bool = False,
        num_drafts: int = 0,
        native: bool | None = None,
    ) -> None:
        """``num_drafts``: as of `NgramProposer`. ``native``: use the native tree (None: where it was built).

        Raises:
            ConfigError: a value is out of range, or ``native`` is True and the library was not built.
        """
        if not 2 <= max_tree_depth <= MAX_DEPTH:
            raise ConfigError(
                f"suffix_decoding_max_tree_depth: expected 2..{MAX_DEPTH} (a match and what follows it), "
                f"got {max_tree_depth}"
            )
        if max_cached_requests < 0:
            raise ConfigError(
                f"suffix_decoding_max_cached_requests: must be 0 or more, got {max_cached_requests}"
            )
        if max_spec_factor < 0:
            raise ConfigError(f"suffix_decoding_max_spec_factor: must be 0 or more, got {max_spec_factor}")
        if not 0 <= min_token_prob <= 1:
            raise ConfigError(f"suffix_decoding_min_token_prob: expected 0..1, got {min_token_prob}")
        self.max_tree_depth = max_tree_depth
        self._num_drafts = num_drafts
        self.max_cached_requests = max_cached_requests
        self.limits = SuffixLimits(max_spec_factor, max_spec_offset, min_token_prob, best_first=tree)
        self._library = _library(native)
        self._engine: NativeEngine | PythonEngine
        if self._library is None:
            self._engine = PythonEngine(self.limits)
            self.max_cached_tokens = _MAX_CACHED_TOKENS_PYTHON
        else:
            self._engine = NativeEngine(self._library, self.limits)
            self.max_cached_tokens = MAX_CACHED_TOKENS
        self._global: Tree | None = None  # made when the first request drafts
        self._requests: dict[int, _Request] = {}
        self._cached: deque[tuple[int, int]] = deque()  # (rid, sequence), oldest first
        self._output_of: dict[int, int] = {}  # rid -> its sequence among the cached
        self._together: _Together | None = None  # who took part in rounds last

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Take the settings from the configuration (``suffix_decoding_*``)."""
        config = context.speculative
        given: dict[str, Any] = {
            "max_tree_depth": config.suffix_decoding_max_tree_depth,
            "max_cached_requests": config.suffix_decoding_max_cached_requests,
            "max_spec_factor": config.suffix_decoding_max_spec_factor,
            "min_token_prob": config.suffix_decoding_min_token_prob,
            "num_drafts": config.num_speculative_tokens,
        }
        return cls(**{name: value for name, value in given.items() if value is not None})

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [proposal for proposal, _ in self.look_ups(rows)]

    def draft_columns(self, columns: DraftColumns) -> DraftBlock | None:
        found = None if says_itself(self, SuffixProposer.propose) else self.look_up_columns(columns)
        return None if found is None else found[0]

    def look_up_columns(self, columns: DraftColumns) -> tuple[DraftBlock, Sequence[int]] | None:
        engine = self._engine
        asked = self._in_columns(columns, sum(columns.facts.known))
        if asked is None or not isinstance(engine, NativeEngine):
            return None
        tokens, sizes, matches = engine.columns(
            [r.local for r in asked], self._global, [r.output for r in asked], columns
        )
        return DraftBlock(tokens, sizes), matches

    def round_drafts(self, columns: DraftColumns, rounds: int, rows: int) -> tuple[RoundDrafts, None] | None:
        engine, together = self._engine, self._together
        if says_itself(self, SuffixProposer.propose):
            return None
        known = together is not None and together.rids == columns.rids and not columns.is_tree
        if together is not None and known and self._has_room(together.most):
            return together.drafts, None
        facts = columns.facts
        more = rounds * (sum(columns.budgets) + len(columns.rids))
        asked = self._in_columns(columns, sum(facts.known) + more)
        if asked is None or not isinstance(engine, NativeEngine):
            return None
        method = method_number(self.name)
        drafts = engine.rounds(method, [r.local for r in asked], self._global, [r.output for r in asked])
        most = sum(facts.known) + sum(facts.max_depths) + len(asked)
        self._together = _Together(columns.rids, drafts, most)
        return drafts, None

    def _in_columns(self, columns: DraftColumns, tokens: int) -> list[_Request] | None:
        """These requests, if one native call can look up for all of them: they want chains, and as many ``tokens`` as
        may come have room in the cache."""
        if not isinstance(self._engine, NativeEngine) or self.limits.best_first or columns.is_tree:
            return None
        if not self._has_room(tokens):
            return None
        asked = [request for rid in columns.rids if (request := self._requests.get(rid)) is not None]
        return asked if len(asked) == len(columns.rids) else None

    def look_ups(self, rows: Sequence[DraftRow]) -> list[tuple[Proposal, int]]:
        """`look_up` of each row, one after the other; in one call where nothing has to be done between them."""
        engine, requests = self._engine, self._requests
        if len(rows) < 2 or not isinstance(engine, NativeEngine):
            return [self.look_up(row) for row in rows]
        taken = 0  # tokens that may enter the cache
        for row in rows:
            if (
                row.rid not in requests
                or row.forced
                or row.speculation.tree is not None
                or row.token_ids_np.dtype != np.int32
            ):
                return [self.look_up(row) for row in rows]
            taken += len(row.token_ids_np)
        if not self._has_room(taken):
            return [self.look_up(row) for row in rows]
        asked = [requests[row.rid] for row in rows]
        found = engine.steps([r.local for r in asked], self._global, [r.output for r in asked], rows)
        name = self.name
        return [
            (Proposal(tokens, parents, name), match_len) if tokens else (EMPTY_PROPOSAL, 0)
            for tokens, parents, match_len in found
        ]

    def look_up(self, row: DraftRow) -> tuple[Proposal, int]:
        """The draft of one row, and the length of the match it follows (0: none)."""
        tokens = row.token_ids_np
        if tokens.dtype != np.int32:
            tokens = tokens.astype(np.int32)
        request = self._requests.get(row.rid)
        if request is None:
            request = self._enter(row.rid, tokens, row.num_prompt)
        found, parents, match_len = self._engine.step(
            request.local, self._global, request.output, tokens, row
        )
        if self._global is not None and self._global.num_tokens > self.max_cached_tokens:
            self._make_room(self._global)
        if row.forced:
            return self._behind_forced(request, tokens, row)
        if not found:
            return EMPTY_PROPOSAL, 0
        if parents is None:
            return chain(found, self.name), match_len
        return Proposal(tuple(found), tuple(parents), self.name), match_len

    def _behind_forced(
        self, request: _Request, token_ids_np: IntArray, row: DraftRow
    ) -> tuple[Proposal, int]:
        """The draft behind tokens that a grammar forces. Empty if nothing followed them: they are proposed anyway."""
        room = min(row.budget, row.max_depth) - len(row.forced)
        if room < 1:
            return EMPTY_PROPOSAL, 0
        forced_np = np.asarray(row.forced, np.int32)
        context_np = np.concatenate([token_ids_np[-self.max_tree_depth :], forced_np])[-self.max_tree_depth :]
        limits = replace(self.limits, budget=room, max_depth=room, best_first=False)
        found = self._engine.draft(request.local, self._global, np.ascontiguousarray(context_np), limits)
        if not found.tokens:
            return EMPTY_PROPOSAL, 0
        return chain([*row.forced, *found.tokens], self.name), found.match_len

    def leaving(self, rid: int, token_ids_np: IntArray) -> None:
        request = self._requests.get(rid)
        if request is None or request.output < 0:
            return
        assert self._global is not None
        known = request.num_prompt + self._global.length(request.output)
        if known < len(token_ids_np):
            self._global.append(request.output, np.ascontiguousarray(token_ids_np[known:], np.int32))

    def seated(self) -> LookUp | None:
        """Where steps stay on a device, drafts are what followed the last of the longest matches, in the request or in
        the newest outputs of the device, and not the likeliest path of all matches together: 2% fewer tokens a step
        were measured. The limits are the same."""
        if not self._num_drafts or self.limits.best_first or says_itself(self, SuffixProposer.propose):
            return None
        limits = self.limits
        return LookUp(
            self._num_drafts,
            self.max_tree_depth - 1,
            1,
            limits.factor,
            limits.offset,
            limits.min_prob,
            past=self.max_cached_requests > 0,
        )

    def remove(self, rid: int) -> None:
        self._together = None
        request = self._requests.pop(rid, None)
        if request is not None and request.output >= 0:
            assert self._global is not None
            self._global.close(request.output)

    def forget(self) -> None:
        self._global = self._together = None
        self._cached.clear()
        self._output_of.clear()
        for request in self._requests.values():
            request.output = -1

    # ------------------------------------------------------------------------------------------ the cache

    @property
    def num_cached_requests(self) -> int:
        """Outputs in the global tree."""
        return len(self._cached)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of them."""
        return self._global.num_tokens if self._global is not None else 0

    def _enter(self, rid: int, token_ids_np: IntArray, num_prompt: int) -> _Request:
        """A request drafts for the first time, or again after a preemption."""
        self._together = None
        local = self._new_tree()
        local.begin()
        request = self._requests[rid] = _Request(local, -1, num_prompt)
        if self.max_cached_requests == 0:
            return request
        if self._global is None:
            self._global = self._new_tree()
        output = self._output_of.get(rid)
        if output is not None:
            # It comes back: if what is there begins its output, that goes on, and nothing is counted twice.
            said = np.ascontiguousarray(token_ids_np[num_prompt:], np.int32)
            if self._global.agree(output, said) == self._global.length(output):
                request.output = output
                return request
        request.output = self._output_of[rid] = self._global.begin()
        self._cached.append((rid, request.output))
        while len(self._cached) > self.max_cached_requests:
            self._evict()
        return request

    def _evict(self) -> None:
        """Take the oldest output out of the global tree; its request, if it still runs, goes on without."""
        assert self._global is not None
        self._together = None
        rid, output = self._cached.popleft()
        self._global.remove(output)
        if self._output_of.get(rid) == output:
            del self._output_of[rid]
        request = self._requests.get(rid)
        if request is not None and request.output == output:
            request.output = -1

    def _has_room(self, tokens: int) -> bool:
        """Whether the cache has room for so many more."""
        return self._global is None or self._global.num_tokens + tokens <= self.max_cached_tokens

    def _make_room(self, tree: Tree) -> None:
        """Evict until what remains, when all that was evicted is gone, fits `max_cached_tokens`; but not the newest."""
        while len(self._cached) > 1 and tree.num_tokens - tree.settle(0) > self.max_cached_tokens:
            self._evict()

    def _new_tree(self) -> Tree:
        if self._library is None:
            return PythonSuffixTree(self.max_tree_depth)
        return NativeSuffixTree(self._library, self.max_tree_depth)


def _library(native: bool | None) -> NativeLibrary | None:
    """The native library if it is wanted and there; says why if it is wanted and not."""
    if native is False:
        return None
    library, reason = native_library(), why_not_native()
    if library is not None:
        try:
            suffix_functions(library)
            return library
        except AttributeError:
            reason = f"{library.path.name} was built without it (python -m draftwise.kernels.cpu.build)"
    if native:
        raise ConfigError(f"suffix: {reason}")
    logger.info(
        "suffix: %s; looking up in plain Python, with %d cached tokens at most",
        reason,
        _MAX_CACHED_TOKENS_PYTHON,
    )
    return None
