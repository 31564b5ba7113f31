"""`StepTrace` as JSON: what a reader needs to draw the draft tree of a step and to colour tokens by their source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from draftwise.sched.request import StepTrace

TokenText = Callable[[int], str]


def step_as_dict(step: StepTrace, index: int, start: int, text: TokenText) -> dict[str, Any]:
    """One step of choice ``index``, whose first token is the ``start``-th of the output.

    ``draft[i]`` is node i of the verified tree (``parent`` -1: child of the last committed token), ``accepted`` the
    nodes of the accepted path. ``tokens`` are those that the step delivered; ``source``: "draft" (accepted),
    "recovered" (the target's own in place of a rejected draft), "bonus" (its own after a path accepted to a leaf),
    "target" (nothing was drafted). ``position``: place within the step, of a draft its depth - 1.

    Example: draft A -> B -> C of which A is accepted, and the target says X: accepted [0], tokens A "draft" 0,
    X "recovered" 1.
    """
    accepted = step.accepted_nodes
    own = _own(step)
    return {
        "index": index,
        "method": step.method,
        "draft": [
            {"token_id": token, "text": text(token), "parent": parent}
            for token, parent in zip(step.draft_tokens, step.draft_parents, strict=True)
        ],
        "accepted": list(accepted),
        "tokens": [
            {
                "token_id": token,
                "text": text(token),
                "source": "draft" if i < len(accepted) else own,
                "position": i,
                "output_index": start + i,
            }
            for i, token in enumerate(step.token_ids)
        ],
    }


def _own(step: StepTrace) -> str:
    """The source of the target's own token at the end of a step."""
    last = step.accepted_nodes[-1] if step.accepted_nodes else -1
    rejected = last in step.draft_parents  # the path ended above a node: its children were refused
    return "target" if not step.draft_tokens else "recovered" if rejected else "bonus"


def token_sources(trace: Sequence[StepTrace] | None, num_tokens: int) -> list[dict[str, Any] | None]:
    """For each of ``num_tokens`` tokens {source, method, position}, as in `step_as_dict`; ``method``: the drafter of
    its step. None for tokens behind the last recorded step.

    Example: of a step of the method ngram, drafted A, accepted it, then X: draft, ngram, 0; bonus, ngram, 1.
    """
    out: list[dict[str, Any] | None] = []
    for step in trace or ():
        method = step.method if step.draft_tokens else "none"
        for i in range(len(step.token_ids)):
            source = "draft" if i < len(step.accepted_nodes) else _own(step)
            out.append({"source": source, "method": method, "position": i})
    return [*out[:num_tokens], *[None] * (num_tokens - len(out))]


class Tracer:
    """Turns the traces of one request's choices into steps, counting tokens on the way."""

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._sent: dict[int, int] = {}

    def steps(self, index: int, trace: Sequence[StepTrace] | None) -> list[dict[str, Any]]:
        """The steps that are new for choice ``index``."""
        out = []
        for step in trace or ():
            start = self._sent.get(index, 0)
            out.append(step_as_dict(step, index, start, self._text))
            self._sent[index] = start + len(step.token_ids)
        return out
