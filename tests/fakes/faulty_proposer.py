"""A drafter with storage that looks after itself, and does wrong what a test asks it to do wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from draftwise.propose.base import Committed, DraftRow, Proposer, ProposerContext
from draftwise.types import IntArray, Proposal, StepInput, TargetOutput, chain

BAD = 4
"""Requests whose prompt begins with this token are those for which it fails."""


class Fault:
    """What goes wrong, and for whom. ``answer``: given the right answer, the wrong one (or raises)."""

    def __init__(self, hook: str = "", answer: Callable[[Any], Any] | None = None) -> None:
        self.hook = hook
        self.answer = answer


def raising(_: Any) -> Any:
    raise RuntimeError("out of ideas")


class FaultyProposer(Proposer):
    """Proposes what it was told will come (``script``: by prompt), now and then with a mistake. Its storage holds the
    token of each slot, so that it can tell whether what it is told is filled was written (``lies``), and whether it is
    asked for a request that it failed for (``asked_again``)."""

    name: ClassVar[str] = "faulty"
    has_storage: ClassVar[bool] = True
    observes: ClassVar[bool] = True
    last: ClassVar[FaultyProposer]

    def __init__(self, block_size: int) -> None:
        FaultyProposer.last = self
        self._block_size = block_size
        self._slots_np = np.full(0, -1, np.int32)
        self.reset(Fault())

    def reset(self, fault: Fault, script: Mapping[tuple[int, ...], Sequence[int]] | None = None) -> None:
        self.fault = fault
        self.script = script or {}
        self.lies: list[str] = []
        self.asked_again: list[tuple[str, int]] = []
        self.calls: dict[str, int] = {}
        self._failed: set[int] = set()
        self._bad: set[int] = set()
        self._filled: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        self._time = 0.0

    @classmethod
    def create(cls, context: ProposerContext) -> FaultyProposer:
        return cls(context.block_size)

    def allocate(self, num_blocks: int) -> None:
        self._slots_np = np.full(num_blocks * self._block_size, -1, np.int32)

    # ------------------------------------------------------------------------------------------------ faults

    def _answer(self, hook: str, rids: Sequence[int], right: Any, *, single: bool = True) -> Any:
        """The right answer, unless it is this hook that fails for one of these requests."""
        self.calls[hook] = self.calls.get(hook, 0) + 1
        if hook not in ("observe", "remove"):  # which are called for all requests of a step, or to clean up
            self.asked_again += [(hook, rid) for rid in rids if rid in self._failed]
        fault = self.fault
        if fault.hook != hook or fault.answer is None or not any(rid in self._bad for rid in rids):
            return right
        if single:
            self._failed.update(rids)
        return fault.answer(right)

    def _slots(self, table_np: IntArray, start: int, stop: int) -> IntArray:
        keys = np.arange(start, stop)
        slots: IntArray = table_np[keys // self._block_size] * self._block_size + keys % self._block_size
        return slots

    def _write(self, table_np: IntArray, tokens_np: IntArray, start: int, stop: int) -> None:
        self._slots_np[self._slots(table_np, start, stop)] = tokens_np[start:stop]

    def _look(self, hook: str, table_np: IntArray, tokens_np: IntArray, filled: int) -> None:
        found = self._slots_np[self._slots(table_np, 0, filled)]
        if not np.array_equal(found, tokens_np[:filled]):
            self.lies.append(f"{hook}: told of {filled} tokens, {found.tolist()} of {tokens_np.tolist()}")

    # ------------------------------------------------------------------------------------------------- hooks

    def observe(self, rids: Sequence[int], batch: StepInput, output: TargetOutput) -> None:
        bad = self._bad if self.calls.get("observe", 0) > 3 else set()
        self._answer("observe", [rid for rid in rids if rid in bad], None)

    def committed(self, parts: Sequence[Committed]) -> Any:
        for part in parts:
            if part.token_ids_np[0] == BAD:
                self._bad.add(part.rid)
            self._look("committed", part.block_table_np, part.token_ids_np, part.filled)
        answer = []
        for part in parts:
            end = part.first_token + len(part.rows_np)
            if part.filled >= part.first_token:  # else what is missing is caught up when it drafts
                self._write(part.block_table_np, part.token_ids_np, part.filled, end)
            answer.append(end if part.filled >= part.first_token else part.filled)
        late = any(len(part.token_ids_np) > 12 for part in parts if part.rid in self._bad)
        rids = [part.rid for part in parts]
        if self.fault.hook == "committed" and not late:
            return answer
        return self._answer("committed", rids, answer)

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        proposals = []
        for row in rows:
            if row.token_ids_np[0] == BAD:
                self._bad.add(row.rid)
            tokens_np = row.token_ids_np
            self._look("propose", row.block_table_np, tokens_np, row.filled)
            known = row.num_tokens
            self._write(row.block_table_np, tokens_np, min(row.filled, known), known)
            prompt = tuple(tokens_np[: row.num_prompt].tolist())
            room = len(row.block_table_np) * self._block_size - known
            count = min(row.budget, row.max_depth, max(room, 0))
            drafts = [*self.script.get(prompt, ())][known - row.num_prompt :][:count]
            count = len(drafts)
            if count > known % 4:
                drafts[known % 4] = 3
            stored = max(count - 1, 0)
            self._slots_np[self._slots(row.block_table_np, known, known + stored)] = drafts[:stored]
            self._filled[row.rid], self._stored[row.rid] = known, stored
            proposals.append(chain(drafts, self.name))
        rids = [row.rid for row in rows]
        if self.fault.hook == "propose" and all(row.num_tokens <= row.num_prompt + 2 for row in rows):
            return proposals  # goes wrong after a few good drafts
        return self._answer("propose", rids, proposals, single=len(rids) == 1)

    def filled_after(self, row: DraftRow) -> Any:
        return self._answer("filled_after", [row.rid], self._filled[row.rid])

    def drafts_stored(self, row: DraftRow) -> Any:
        return self._answer("drafts_stored", [row.rid], self._stored[row.rid])

    def trimmed(self, rid: int, num_tokens: int) -> None:
        if self.fault.hook == "trimmed":  # it happens to few
            self._bad.add(rid)
        self._answer("trimmed", [rid], None)

    def settle(self, rid: int, token_ids_np: IntArray, block_table_np: IntArray) -> Any:
        known = min(self._filled.get(rid, 0), len(token_ids_np))
        return self._answer("settle", [rid], known if self.fault.hook == "settle" else 0)

    def leaving(self, rid: int, token_ids_np: IntArray) -> None:
        if len(token_ids_np) and token_ids_np[0] == BAD and rid in self._filled:
            self._bad.add(rid)
        self._answer("leaving", [rid], None)

    def remove(self, rid: int) -> None:
        self._filled.pop(rid, None)
        self._stored.pop(rid, None)
        self._answer("remove", [rid], None)

    def forget(self) -> None:
        if self.fault.hook == "forget":
            raising(None)

    @property
    def forward_time(self) -> Any:
        return (
            self.fault.answer(self._time) if self.fault.hook == "forward_time" and self.fault.answer else 0.0
        )

    @forward_time.setter
    def forward_time(self, value: float) -> None:
        self._time = value


def _with(**changes: Any) -> Callable[[list[Proposal]], list[Any]]:
    """Proposals of which every field that is named is replaced."""

    def change(right: list[Proposal]) -> list[Any]:
        out = []
        for proposal in right:
            n = max(len(proposal.tokens), 1)
            fields: dict[str, Any] = {
                "tokens": (5,) * n,
                "parents": tuple(range(-1, n - 1)),
                "method": "faulty",
                "draw": "independent",
                "q": None,
                "q_rows": (),
            }
            given = {name: value(n) if callable(value) else value for name, value in changes.items()}
            out.append(Proposal(**(fields | given)))
        return out

    return change


def wrong_proposals(vocab: int) -> Mapping[str, Callable[[Any], Any]]:
    """Ways to go wrong, by what a person would call them."""

    def with_q(make: Callable[[int], Any], rows: Callable[[int], Any] = lambda n: tuple(range(n))) -> Any:
        return _with(q=make, q_rows=rows)

    def uniform(n: int) -> torch.Tensor:
        return torch.full((n, vocab), 1.0 / vocab)

    def spoiled(value: float) -> Callable[[int], torch.Tensor]:
        def make(n: int) -> torch.Tensor:
            q = uniform(n)
            q[-1, 7] = value
            return q

        return make

    def exchanged(n: int) -> torch.Tensor:
        q = uniform(n)
        q[:, 7], q[:, 8] = -0.5, 0.5 + 2.0 / vocab
        return q

    return {
        "q negative with a sum of 1": with_q(exchanged),
        "None": lambda _: None,
        "Nones": lambda right: [None for _ in right],
        "too few": lambda right: right[:-1],
        "too many": lambda right: [*right, right[0]],
        "text": lambda right: ["5 6" for _ in right],
        "tuples": lambda right: [((5,), (-1,)) for _ in right],
        "another class": lambda right: [
            SimpleNamespace(
                tokens=(5,), parents=(-1,), method="x", draw="fixed", q=None, q_rows=(), is_chain=True
            )
            for _ in right
        ],
        "a token of two is -1": _with(tokens=(5, -1), parents=(-1, -1)),
        "a token of two is V": _with(tokens=(vocab, 5), parents=(-1, -1)),
        "no parents": _with(tokens=(5,), parents=()),
        "parents alone": _with(tokens=(), parents=(-1,)),
        "token -1": _with(tokens=lambda n: (-1,) * n),
        "token V": _with(tokens=lambda n: (vocab,) * n),
        "token 1.5": _with(tokens=lambda n: (1.5,) * n),
        "no tokens": _with(tokens=None),
        "a tensor of floats": _with(tokens=lambda n: torch.ones(n)),
        "too many nodes": _with(tokens=(5,) * 64, parents=(-1,) * 64),
        "too deep": _with(tokens=(5,) * 40, parents=tuple(range(-1, 39))),
        "parents are no tree": _with(tokens=(5, 6), parents=(1, -1)),
        "parent -2": _with(tokens=(5, 6), parents=(-1, -2)),
        "too few parents": _with(tokens=(5, 6), parents=(-1,)),
        "method is no name": _with(method=None),
        "drawn somehow": _with(draw="somehow"),
        "q nan": with_q(spoiled(float("nan"))),
        "q infinite": with_q(spoiled(float("inf"))),
        "q negative": with_q(spoiled(-0.5)),
        "q adds up to 2": with_q(lambda n: 2 * uniform(n)),
        "q of one dimension": with_q(lambda n: uniform(1)[0]),
        "q too narrow": with_q(lambda n: uniform(n)[:, 1:]),
        "q of doubles": with_q(lambda n: uniform(n).double()),
        "q is a list": with_q(lambda n: uniform(n).tolist()),
        "q_rows beyond q": with_q(uniform, lambda n: tuple(range(1, n + 1))),
        "q_rows negative": with_q(uniform, lambda n: (-1,) * n),
        "q_rows too few": with_q(uniform, lambda n: ()),
        "q_rows are floats": with_q(uniform, lambda n: (0.0,) * n),
    }
