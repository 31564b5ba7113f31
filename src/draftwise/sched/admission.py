"""Admission of a waiting request: whether it can enter, and what the executor is told of it. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftwise.kv.manager import KVManager
from draftwise.kv.prefix_cache import PrefixMatch
from draftwise.sched.request import Request
from draftwise.types import NewRequest


@dataclass(frozen=True, slots=True)
class Grant:
    """The request may enter: ``prefix`` is what the cache has of it, ``num_new`` of its tokens are computed in this
    step, and all of its known tokens have room."""

    prefix: PrefixMatch
    num_new: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request has to wait, and for what.

    ``reason`` "rows": a prompt that is computed in one step found ``found`` rows. "blocks": the known tokens need more
    blocks than the ``found`` free ones. Either way a longer cached prefix helps: ``missing`` names its next block.
    """

    rid: int
    reason: Literal["rows", "blocks"]
    found: int
    missing: bytes | None

    def stands(self, request: Request, rows: int, kv: KVManager) -> bool:
        """Whether nothing has changed that could turn the answer: asking again costs a hash of the whole prompt."""
        if request.rid != self.rid:
            return False
        if self.missing is not None and kv.is_cached(self.missing):
            return False
        return (rows if self.reason == "rows" else kv.num_free) <= self.found


def admission(request: Request, rows: int, kv: KVManager, *, whole: bool) -> Grant | Refusal:
    """Can the request enter with at most ``rows`` rows, at least 1, in this step? Changes nothing.

    Room for *all* known tokens must be there, though computing them may take several steps: admitting on the first
    chunk alone makes requests preempt each other half-way. ``whole``: its tokens must be computed in this one step.

    Example (blocks of 4, 5 of them free): 22 known tokens of which the cache has 8 need 6 - 2 = 4 blocks. If nobody
    else holds the two cached blocks they are among the 5 free ones, which leaves 3: refused.
    """
    prefix = kv.match(request.known_np, salt=request.salt, use_cache=request.takes_prefix)
    missing = request.num_tokens - len(prefix.blocks) * kv.block_size
    if whole and missing > rows:
        return Refusal(request.rid, "rows", rows, prefix.missing)
    needed = kv.blocks_for(request.num_tokens) - len(prefix.blocks)
    if needed > kv.num_free - kv.num_idle(prefix):
        return Refusal(request.rid, "blocks", kv.num_free, prefix.missing)
    return Grant(prefix, min(missing, rows))


def entering(request: Request, cached: int, blocks: tuple[int, ...]) -> NewRequest:
    """What the executor has to know of an admitted request, of which the cache had the first ``cached`` tokens, in
    ``blocks``."""
    return NewRequest(
        rid=request.rid,
        token_ids_np=request.known_np.copy(),
        num_prompt=request.num_prompt,
        max_total=request.max_total,
        sampling=request.params,
        seed=request.seed,
        sample_index=request.sample_index,
        speculation=request.speculation,
        num_computed=cached,
        block_ids=blocks,
        stop_token_ids=request.stop_token_ids,
        bad_words_ids=request.bad_words_ids,
        prompt_logprobs=request.params.prompt_logprobs if request.wants_prompt_logprobs else None,
        adapter=request.adapter,
    )
