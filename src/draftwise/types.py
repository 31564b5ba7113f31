"""The data that flows between the parts. Plain frozen data; no part keeps a reference to another part here.

Shapes: T rows of a ragged batch, R requests in it, M rows with logits, V vocabulary, H hidden size.
Host arrays end in ``_np``; everything else that has a shape is a torch tensor on the engine's device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from draftwise.config.trees import DynamicTree
from draftwise.names import MAX_TREE_NODES

IntArray = npt.NDArray[np.int32]
LogitsProcessor = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""``fn(token_ids, logits) -> logits``: prompt and output ids so far, logits float32 [V]. Must be pure."""


# --------------------------------------------------------------------------------------------- proposals

DrawKind = Literal["independent", "without_replacement", "fixed"]


# Not frozen, like other records that are made for every request in every step: freezing triples what it takes to make
# one. Nobody writes to it.
@dataclass(slots=True, unsafe_hash=True)
class Proposal:
    """A tree of draft tokens below the last committed token (the root).

    ``parents[i]`` is the node index of i's parent, -1 for a child of the root; parents precede children;
    siblings stand in drawing order. A chain is ``parents == (-1, 0, 1, ...)``; no proposal is the empty tree.

    Example: tokens (5, 7, 9, 2), parents (-1, -1, 0, 2) is root -> {5, 7}, 5 -> 9, 9 -> 2.

    ``q`` is the draft distribution [P, V] float32, one row for each parent that has children, perhaps among those of
    other proposals; ``q_rows[i]`` is the row of ``q`` from which node i was drawn (siblings share it). ``q is None``:
    point masses (n-gram, suffix, greedy drafts, fixed children). ``draw`` says how siblings were drawn from ``q``.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    method: str = "none"
    draw: DrawKind = "fixed"
    q: torch.Tensor | None = None  # [P, V] float32
    q_rows: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        n = len(self.parents)
        return self.parents == (_CHAINS[n] if n <= MAX_TREE_NODES else chain_parents(n))

    def prefix(self, n: int) -> Proposal:
        """The first n nodes. Valid for any n: parents precede children, and n never depends on the tokens."""
        if n >= len(self.tokens):
            return self
        return Proposal(
            self.tokens[:n], self.parents[:n], self.method, self.draw, self.q if n else None, self.q_rows[:n]
        )

    def depths(self) -> list[int]:
        """Depth of each node; children of the root have depth 1."""
        out: list[int] = []
        for parent in self.parents:
            out.append(1 if parent < 0 else out[parent] + 1)
        return out


EMPTY_PROPOSAL = Proposal()

_CHAINS = [tuple(range(-1, n - 1)) for n in range(MAX_TREE_NODES + 1)]


def chain_parents(n: int) -> tuple[int, ...]:
    """Parents of a chain of n nodes: 3 -> (-1, 0, 1)."""
    return _CHAINS[n] if n < len(_CHAINS) else tuple(range(-1, n - 1))


def tree_depth(parents: tuple[int, ...]) -> int:
    """Nodes of a tree's longest path: (-1, 0, -1) -> 2."""
    n = len(parents)
    if parents == (_CHAINS[n] if n <= MAX_TREE_NODES else chain_parents(n)):
        return n
    return _tree_depth(parents)


@functools.lru_cache(maxsize=1024)
def _tree_depth(parents: tuple[int, ...]) -> int:
    """Asked of every tree at several places in a step, and requests mostly share their shapes."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def chain(
    tokens: Sequence[int],
    method: str,
    q: torch.Tensor | None = None,
    draw: DrawKind | None = None,
    first_q: int = 0,
) -> Proposal:
    """A chain proposal; ``q`` [P, V] float32 when the tokens were drawn from its rows ``first_q ..``."""
    n = len(tokens)
    kind: DrawKind = draw or ("fixed" if q is None else "independent")
    q_rows = () if q is None else tuple(range(first_q, first_q + n))
    return Proposal(tuple(tokens), chain_parents(n), method, kind, q, q_rows)


# Made for every request in every step: a named tuple takes a third of a frozen dataclass's time.
class Verification(NamedTuple):
    """The tokens that one request commits in a step.

    ``path``: accepted node indices from the root downwards. ``token_ids``: their tokens, then the bonus
    token (all accepted) or recovered token: always ``len(path) + 1`` tokens.
    ``logprobs``: one entry per token of ``token_ids`` if the request asked for logprobs.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw (unprocessed) log-probabilities at one position: the token's own, its rank (1: most likely), the top k."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


# -------------------------------------------------------------------------------------------- speculation


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request speculates, resolved: defaults filled in, names validated.

    ``method``: "none" or the name of a loaded proposer. ``rule``: greedy, rejection, block, coupled,
    typical, synthetic. ``tree``: node parents of a static tree (same form as `Proposal.parents`) with
    ``tree_ranks`` the rank of each node among its parent's children, or None for a chain. ``dynamic``: the limits of
    a tree that is shaped by the drafter's confidence, of which ``num_speculative_tokens`` nodes are verified; or
    None. At most one of the two is given.
    """

    method: str = "none"
    num_speculative_tokens: int = 0
    rule: str = "greedy"
    tree: tuple[int, ...] | None = None
    tree_ranks: tuple[int, ...] | None = None
    dynamic: DynamicTree | None = None
    whole_prompt: bool = False
    """Every token of the prompt has to pass the target: no cached prefix."""


# ------------------------------------------------------------------------------------- the plan of a step


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the executor: new, or resumed after a preemption (then with its output so far)."""

    rid: int
    token_ids_np: IntArray  # [n] every known token: prompt, then output
    num_prompt: int
    max_total: int  # prompt + output tokens at which the request ends
    sampling: object  # sampling.SamplingParams
    seed: int
    sample_index: int  # which of the n samples of the prompt; part of the noise key
    speculation: Speculation
    num_computed: int  # tokens covered by cached blocks
    block_ids: tuple[int, ...]  # cached blocks, K/V already written
    stop_token_ids: frozenset[int]  # a token that ends the request (drafting after it is useless)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    adapter: int = 0  # number of its adapter (`Executor.load_adapter`); 0: none


new_record = tuple.__new__
"""``new_record(RowPlan, (rid, 1, ...))`` is ``RowPlan(rid, 1, ...)`` with all its fields, in less than half the time:
for the few records that are made for every request in every step."""


class RowPlan(NamedTuple):
    """The work of one request in this step: ``num_new`` known tokens, then ``num_draft`` draft nodes.

    Slots: tokens up to num_computed are committed; the known tokens and nodes of this step follow, then
    lookahead slots for the drafter::

        | committed ... | new (root last) | draft nodes | lookahead |
        ^0              ^num_computed     ^+num_new     ^+num_draft ^+lookahead
    """

    rid: int
    num_new: int
    num_draft: int
    draft_budget: int  # nodes to propose at the end of this step; 0: do not draft
    new_block_ids: tuple[int, ...] = ()  # appended to the request's block table; contents undefined
    follow: bool = True
    """Whether the request's drafter is told what this step commits, where it wants to be told (`Proposer.committed`).
    Who drafts is told."""


CUT_BYTES = 4 * 64
"""Of a request in `RoundCuts.tables`."""


class RoundCuts(NamedTuple):
    """What is verified and drafted in the later rounds of a step.

    ``tables`` uint8 [R, 4, 64]: of so many nodes that wait, this many are verified, when nothing, something or all of
    the proposal before was accepted, or nothing is known of it; ``outcomes`` uint8 [R]: which of these it is before the
    first round. ``once`` uint8 [R], or empty: not 0 for a request that drafts behind the first round only.
    """

    tables: bytes
    outcomes: bytes
    once: bytes = b""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A serialisable diff: everything the executor needs to know that it does not know already."""

    step: int
    rows: Sequence[RowPlan]
    new: tuple[NewRequest, ...] = ()
    removed: tuple[int, ...] = ()  # finished, cancelled or preempted; applied before `new`
    trimmed: tuple[tuple[int, int], ...] = ()  # (rid, blocks kept): surplus blocks returned; applied first
    rounds: int = 1
    """Rounds of target, verification and drafts that the step may have, for which there are blocks; later ones verify
    what was drafted in the one before. The executor may compute fewer (`runner.rounds`)."""
    round_seconds: float = 0.0  # no further round is begun that would end later than that
    cuts: RoundCuts | None = None  # of later rounds; None: all that waits is verified


class RowResult(NamedTuple):
    """The results of one request in a step. A prompt chunk that ends before the last known token has no tokens."""

    rid: int
    token_ids: tuple[int, ...] = ()  # accepted drafts, then the bonus or recovered token
    num_drafted: int = 0  # draft nodes verified
    num_accepted: int = 0
    accepted_nodes: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()  # the verified tree, for reports
    draft_parents: tuple[int, ...] = ()
    method: str = "none"  # which proposer drafted what was verified
    num_proposed: int = 0  # nodes waiting for the next step
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the chunk's tokens (after the first)
    kv_transfer_params: Mapping[str, object] | None = None  # see `Proposer.transfer`
    error: str | None = None  # this request failed (for example its logits processor raised)


class DrafterFailure(NamedTuple):
    """A drafter raised, or gave an answer that cannot be. ``hook``: what it was asked, a method of `Proposer`, or of
    `SeatedDrafter` with "seated_" before it. ``rids``: requests that go on without speculation."""

    method: str
    hook: str
    rids: tuple[int, ...]
    error: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """``rows``: of the step, or of its last round; ``earlier``: of the rounds before, in their order.
    ``drafter_failures``: of this step, and of what happened between the last one and it.

    Times in seconds of the host's clock: ``input_time`` applying the diff and building inputs, ``forward_time`` the
    target's pass with logits, ``verify_time`` sampling, verification and compaction, ``draft_time`` the proposers, what
    they keep of the target's pass included, ``draft_forward_time`` that part of it which their models' passes took,
    ``steady_round_time`` a round of the later half of several, all in all (median); 0: not known.
    Who cannot tell leaves ``forward_time`` and ``draft_time`` at 0."""

    step: int
    rows: Sequence[RowResult]
    input_time: float = 0.0
    forward_time: float = 0.0
    verify_time: float = 0.0
    draft_time: float = 0.0
    draft_forward_time: float = 0.0
    steady_round_time: float = 0.0
    drafter_failures: tuple[DrafterFailure, ...] = ()
    earlier: tuple[Sequence[RowResult], ...] = ()

    @property
    def num_rounds(self) -> int:
        """Rounds that were computed; times are of all of them."""
        return len(self.earlier) + 1


# ------------------------------------------------------------------------------------- one forward pass


@dataclass(frozen=True, slots=True)
class StaticRows:
    """The data of an `AttentionBatch` on a device: for passes that are captured once and replayed.

    R requests of N rows each, whatever a request has: its rows stand first, what follows fills up. Row i of request r
    is row ``r * N + i`` of the pass. Its key is ``context[r] + i`` (of a tree that is computed in several passes: the
    row of the lowest bit that is its own). Rows that fill up are written to a slot that nobody reads, and what comes
    out of them is thrown away; a filled-up row of a tree has ancestors 1.

    Tensors stay where they are; their contents change between replays. Reading anything else of a batch, such as its
    host arrays, would freeze it.
    """

    rows: int  # N
    max_keys: int  # no row has so many keys or more before it; the tables reach so far and 64 + N further
    context: torch.Tensor  # [R] int32
    first_key: torch.Tensor  # [R] int32
    is_tree: torch.Tensor  # [R] int32, 0 or 1
    tables: torch.Tensor  # [R, blocks] int32, of valid blocks all
    ancestors: torch.Tensor  # [R * N] int64
    adapters: torch.Tensor | None = None  # [R] int32, places of adapters, 0: none; None: nobody may have one


class AttentionApart(Protocol):
    """Stands for attention in a pass that is captured without it; see `graphs.pieces`."""

    def __call__(self, attend: Attend, q: torch.Tensor, width: int) -> torch.Tensor:
        """Take note of a call: ``q`` [T, Hq, D] is where its queries are found. Returns where its result [T, width] of
        q's dtype will stand."""

    def queries(self, rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, Hq, D]: queries that are made there need not be copied."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the rows of a ragged batch look. Rows of request r: ``query_start_np[r]:query_start_np[r+1]``.

    Key j of request r stands in slot ``block_tables[r, j // block_size] * block_size + j % block_size``.
    Keys 0..context_len-1 are committed tokens at positions 0..context_len-1; keys context_len + i are the
    request's own rows i of this pass. A causal row i sees all committed keys and rows 0..i. If ``is_tree_np[r]``,
    row i sees the committed keys and those rows j whose bit j is set in ``ancestors[row]`` (itself included);
    a row's position is then ``positions[row]``, not context_len + i.

    Example: context 10, root + tree (parents -1, -1, 0): positions 10, 11, 11, 12; ancestors
    0b0001, 0b0011, 0b0101, 0b1011.

    ``first_key_np``: keys before it are seen by nobody, whatever their slots hold; at most context_len. None: 0.
    ``tree_start_np``: a tree may be computed level by level. So many of its rows were stored by earlier passes, at keys
    context_len .. context_len + start - 1; row i of this pass is tree row start + i and stands at that key; bits of
    ``ancestors`` count all rows of the tree. 0 for a causal request. None: 0.

    Example: the tree above in two passes: rows 0..2 as they are, then one row with start 3 and ancestors 0b1011.
    """

    query_start_np: IntArray  # [R + 1]
    context_len_np: IntArray  # [R]
    is_tree_np: npt.NDArray[np.bool_]  # [R]
    block_tables_np: IntArray  # [R, max blocks]; entries past a request's blocks are 0
    ancestors_np: npt.NDArray[np.uint64] | None  # [T]; None when no request is a tree
    block_size: int
    first_key_np: IntArray | None = None  # [R]
    tree_start_np: IntArray | None = None  # [R]
    static: StaticRows | None = None  # then the arrays above say nothing but how many requests there are
    apart: AttentionApart | None = None  # then they say nothing at all: attention is run on another batch
    cache: dict[str, object] = field(default_factory=dict)  # a backend's per-pass preparation, made once


Attend = Callable[[torch.Tensor, AttentionBatch, torch.Tensor], object]
"""Attention of one layer: queries [T, Hq, D], whose rows they are, and where the result goes, [T, width]."""


class StateRows(NamedTuple):
    """The rows of models with recurrent state (`kv.states`): ``slots`` [R] each request's own number, ``revocable``
    [R] how many
    of its last tokens may be taken back; a drafter's earlier passes count, so there may be more than it has rows."""

    slots: Sequence[int]
    revocable: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One ragged batch for a decoder model."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64; where each row's K/V is written: block * block_size + offset
    attention: AttentionBatch
    states: StateRows | None = None
    adapters: tuple[int, ...] | None = (
        None  # [R] which adapter each request has, 0: none; None: nobody has one
    )


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """``hidden``: after the final norm, all rows. ``captured[i]``: hidden states entering layer i, all rows
    (i == number of layers: leaving the last one, before the final norm)."""

    hidden: torch.Tensor  # [T, H]
    captured: Mapping[int, torch.Tensor] = field(default_factory=dict)  # layer -> [T, H]


class ChainKey(NamedTuple):
    """One request's place in the noise of `sampling.noise`, its temperature, and what it leaves of distributions."""

    seed: int
    sample_index: int
    base: int  # committed tokens
    node: int  # of the first token that is drawn; it stands at position base + node
    scale: float  # one over the temperature
    log_min_p: float = -math.inf
    top_k: int = 0  # 0: all
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class ChainDraws:
    """How `DecoderModel.draft_chains` draws: by inverse CDF of softmax(scale * logits) (stream "draft"), or as the
    argmax of scale * logits + noise (stream "shared"), with the keys that `sampling.draw.draft_tokens` would use.

    A loop may leave min_p, top_k and top_p to the target, as captured ones do: what it reports is what it drew from,
    so that it costs acceptance and nothing else."""

    stream: Literal["draft", "shared"]
    keys: tuple[ChainKey, ...]  # one per request


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A static tree: parents first (-1: the root), ``ranks`` among the parent's best tokens."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]


class TreeDraws(NamedTuple):
    """How `DecoderModel.draft_trees` drafts one request's tree of fixed children. A token behind a node scores
    ``scale * logits + noise_scale * noise``, the shared noise of (``seed``, ``sample_index``) at the token's position,
    which is the same for all nodes of a level; ``noise_scale`` 0: there is none.

    With a ``shape`` each of its nodes is the token of its rank. Else the tree is EAGLE-2's: on each of ``depth`` levels
    the ``top_k`` nodes of highest probability, by the product of softmax(score) along the path, get ``top_k`` children;
    the best ``nodes`` of all are kept, best first. ``top_k * (depth - 1)`` is at most 64.
    """

    scale: float = 1.0
    noise_scale: float = 0.0
    seed: int = 0
    sample_index: int = 0
    shape: TreeShape | None = None
    top_k: int = 1
    depth: int = 1
    nodes: int = 1


class DraftedTree(NamedTuple):
    """Tokens of the target's vocabulary, and parents (-1: the root) that precede them."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
