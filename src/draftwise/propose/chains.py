"""Functions shared by drafters that draw a chain token by token: draft models and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from draftwise.kernels.cpu.book_drafts import ANY_LENGTH, Kind
from draftwise.propose.base import DraftRow
from draftwise.propose.columns import DraftColumns
from draftwise.sampling.draw import DraftSampleMethod, draft_tokens, draws_from_q
from draftwise.sampling.logits import LogitsRow
from draftwise.structured.cursor import mask_drafts
from draftwise.types import EMPTY_PROPOSAL, ChainDraws, ChainKey, Proposal, chain, chain_parents

ChainKind = Kind
D = TypeVar("D", bound="ChainDraft")


@dataclass(slots=True)
class ChainDraft:
    """One row while it drafts."""

    row: DraftRow
    length: int  # tokens to draft, forced ones included; not positive: none
    tokens: list[int]  # forced ones first
    q: list[torch.Tensor] = field(default_factory=list)  # [V] per drawn token; counts if the row is sampled
    all_q: torch.Tensor | None = (
        None  # [P, V]: the same of all tokens, in rows first_q .., if drawn in one go
    )
    first_q: int = 0
    tree: Proposal | None = None  # what was drafted, if it is a tree

    def proposal(self, name: str, method: DraftSampleMethod) -> Proposal:
        """The drafted tokens. A forced token counts as drawn from a distribution that has no other token."""
        if self.tree is not None:
            return self.tree
        if not self.tokens:
            return EMPTY_PROPOSAL
        has_q = bool(self.q) or self.all_q is not None
        if not has_q or not draws_from_q(self.row.sampling, self.row.speculation.rule, method):
            return chain(self.tokens, name)
        if self.all_q is not None:
            return chain(self.tokens, name, self.all_q, first_q=self.first_q)
        num_forced = len(self.tokens) - len(self.q)
        q = torch.stack([self.q[0]] * num_forced + self.q)
        if num_forced:
            q[:num_forced] = 0.0
            q[range(num_forced), self.tokens[:num_forced]] = 1.0
        return chain(self.tokens, name, q)

    def take(self, tokens: Sequence[int], q: torch.Tensor | None, first_q: int = 0) -> None:
        """Tokens drawn in one go; if they were sampled, from rows ``first_q ..`` of ``q`` [P, V]."""
        if q is not None:
            if not self.tokens:
                self.all_q, self.first_q = q, first_q
            else:
                if self.all_q is not None:
                    self.q.extend(self.all_q[self.first_q : self.first_q + len(self.tokens)])
                    self.all_q = None
                self.q.extend(q[first_q : first_q + len(tokens)])
        self.tokens.extend(tokens)


def longest_chain(row: DraftRow, max_len: int, block_size: int) -> int:
    """Tokens that can be drafted for a row; not positive: none.

    Draft d (1..length) is drawn from the row at position num_tokens - 2 + d, the last that is fed: it must lie below
    ``max_len`` and in the request's blocks.
    """
    n = row.num_tokens
    slots = len(row.block_table_np) * block_size
    if n > max_len or n > slots:
        return 0
    return min(row.budget, row.max_depth, max_len - n + 1, slots - n + 1)


def chain_kind(row: DraftRow, method: DraftSampleMethod) -> ChainKind:
    """How `draft_tokens` would draw for the row."""
    rule = row.speculation.rule
    if draws_from_q(row.sampling, rule, method):
        return "sampled"
    noisy = rule == "coupled" and not row.sampling.is_greedy and method == "probabilistic"
    return "coupled" if noisy else "argmax"


def alike(drafts: Sequence[D], method: DraftSampleMethod) -> list[tuple[ChainKind | None, list[D]]]:
    """Groups of rows that want the same number of tokens (near their ends requests want fewer), each with its draws.
    A group's draws are given if a model can do the whole loop for it: only a draw stands between its passes, of what
    temperature, min_p, top_k and top_p leave. None: it cannot.

    Penalties and excluded words are the target's alone: looking at them after every draft takes up to twice the time of
    the loop, and not looking costs little acceptance unless they are strong (docs/algorithms/sampling.md).
    """
    groups: dict[tuple[ChainKind | None, int], list[D]] = {}
    for draft in drafts:
        row = draft.row
        plain = not row.sampling.steers and row.grammar is None
        key = (chain_kind(row, method) if plain else None, draft.length - len(draft.tokens))
        group = groups.get(key)
        if group is None:
            group = groups[key] = []
        group.append(draft)
    return [(kind, group) for (kind, _), group in groups.items()]


def one_loop(
    rows: Sequence[DraftRow],
    method: DraftSampleMethod,
    max_len: int,
    block_size: int,
    most: int = ANY_LENGTH,
) -> tuple[ChainKind, int] | None:
    """How all rows draw, and how many tokens each, ``most`` at most, if one loop of a model can draft for all of them
    as they stand: it is what `alike` would find, without a record for each. None: they differ, or something is
    forced, masked or a tree."""
    rule, greedy, length = "", False, 0
    for row in rows:
        speculation, state, known = row.speculation, row.sampling, len(row.token_ids_np)
        # as `longest_chain`, whose exceptions are all lengths below 1
        slots = len(row.block_table_np) * block_size
        own = min(row.budget, row.max_depth, max_len - known + 1, slots - known + 1, most)
        if not length:
            rule, greedy, length = speculation.rule, state.is_greedy, own
        if (
            own != length
            or own < 1
            or speculation.rule != rule
            or state.is_greedy != greedy
            or state.steers
            or row.forced
            or row.grammar is not None
            or speculation.tree is not None
            or speculation.dynamic is not None
        ):
            return None
    return (chain_kind(rows[0], method), length) if rows else None


def loop_proposals(
    drawn: Sequence[Sequence[int]], q: torch.Tensor | None, kind: ChainKind, name: str
) -> list[Proposal]:
    """What one loop drew, ``drawn`` [R, steps], from ``q`` [R, steps, V] if that is given, as proposals."""
    if not drawn:
        return []
    steps = len(drawn[0])
    parents = chain_parents(steps)
    if q is None or kind != "sampled":
        return [Proposal(tuple(tokens), parents, name) for tokens in drawn]
    all_q = q.flatten(0, 1)  # of all requests, one after the other
    return [
        Proposal(tuple(tokens), parents, name, "independent", all_q, tuple(range(i * steps, (i + 1) * steps)))
        for i, tokens in enumerate(drawn)
    ]


def loop_draws(rows: Sequence[DraftRow], kind: ChainKind) -> ChainDraws | None:
    """`chain_draws` of rows that have no tokens yet."""
    if kind == "argmax":
        return None
    keys = []
    for row in rows:
        seed, top_p, scale, log_min_p, top_k, sample_index = row.sampling.draw_fields
        keys.append(ChainKey(seed, sample_index, len(row.token_ids_np), 0, scale, log_min_p, top_k, top_p))
    return ChainDraws("shared" if kind == "coupled" else "draft", tuple(keys))


def kind_of_columns(columns: DraftColumns, method: DraftSampleMethod) -> ChainKind:
    """`chain_kind` of all of them."""
    if columns.greedy:
        return "argmax"
    state, rule = columns.first_state, columns.speculation.rule
    if draws_from_q(state, rule, method):
        return "sampled"
    return "coupled" if rule == "coupled" and method == "probabilistic" else "argmax"


def column_draws(columns: DraftColumns, kind: ChainKind) -> ChainDraws | None:
    """`loop_draws` of requests in columns."""
    if kind == "argmax":
        return None
    keys = []
    for state, known in zip(columns.sampling, columns.facts.known, strict=True):
        seed, top_p, scale, log_min_p, top_k, sample_index = state.draw_fields
        keys.append(ChainKey(seed, sample_index, known, 0, scale, log_min_p, top_k, top_p))
    return ChainDraws("shared" if kind == "coupled" else "draft", tuple(keys))


def chain_draws(drafts: Sequence[ChainDraft], kind: ChainKind) -> ChainDraws | None:
    """The draws for the next tokens of each row, with the keys that `draft_tokens` would use; None: no noise."""
    if kind == "argmax":
        return None
    keys = []
    for draft in drafts:
        seed, top_p, scale, log_min_p, top_k, sample_index = draft.row.sampling.draw_fields
        base, node = draft.row.num_tokens, len(draft.tokens)
        keys.append(ChainKey(seed, sample_index, base, node, scale, log_min_p, top_k, top_p))
    return ChainDraws("shared" if kind == "coupled" else "draft", tuple(keys))


def draw_next(
    drafts: Sequence[ChainDraft],
    logits: torch.Tensor,
    method: DraftSampleMethod,
    vocab_map: torch.Tensor | None = None,
) -> None:
    """Draw one token per row from the drafter's distribution behind its tokens: ``logits`` [R, Vd], raw; consumed."""
    paths = [tuple(d.tokens) for d in drafts]
    masks: list[torch.Tensor | None] = [None] * len(drafts)
    if any(d.row.grammar is not None for d in drafts):
        cursors = [d.row.grammar for d in drafts]
        if vocab_map is None:
            logits = logits.float()
            mask_drafts(logits, cursors, paths)
        else:
            masks = [
                None if cursor is None else cursor.mask(path, logits.device)
                for cursor, path in zip(cursors, paths, strict=True)
            ]
    rows = [
        LogitsRow(d.row.sampling, path, d.row.token_ids_np, mask)
        for d, path, mask in zip(drafts, paths, masks, strict=True)
    ]
    tokens, q = draft_tokens(
        logits,
        rows,
        rules=[d.row.speculation.rule for d in drafts],
        positions=[d.row.num_tokens + len(d.tokens) for d in drafts],
        nodes=[len(d.tokens) for d in drafts],
        bases=[d.row.num_tokens for d in drafts],
        method=method,
        vocab_map=vocab_map,
    )
    for i, (draft, token) in enumerate(zip(drafts, tokens, strict=True)):
        draft.tokens.append(token)
        if q is not None:
            draft.q.append(q[i])


def draw_in_one_pass(
    drafts: Sequence[ChainDraft],
    logits: torch.Tensor,
    method: DraftSampleMethod,
    vocab_map: torch.Tensor | None = None,
) -> None:
    """Draw all tokens that are left of drafts from logits that one pass gave: [R, Vd], a draft's rows side by side.

    Example: 4 tokens of one request and 2 of the next: their first ones are drawn from rows 0 and 4, their second ones
    from rows 1 and 5.
    """
    active: list[tuple[ChainDraft, int]] = []
    first = 0
    for draft in drafts:
        active.append((draft, first))
        first += draft.length - len(draft.tokens)
    while active:
        wanted = torch.tensor([row for _, row in active], device=logits.device)
        draw_next([draft for draft, _ in active], logits.index_select(0, wanted), method, vocab_map)
        active = [(draft, row + 1) for draft, row in active if draft.length > len(draft.tokens)]
