"""The worker's side of the pipe: an engine that answers, one JSON line per question.

Runs inside each peer's own environment: needs nothing but the standard library.

    question {"do": "load", "model": "...", ...}              answer {"ok": {...}}
    question {"do": "step", "context": 64, "rows": 1, ...}    answer {"ok": [0.051, 0.05]}
                                                              or {"unsupported": "why"}, {"error": "what happened"}
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Unsupported(Exception):
    """The engine cannot do what was asked; the message says why. Its cell of the table stays empty."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker serves for its whole life.

    ``format``: of the weights, "bf16", "int8" or "int4" (engines may know variants). ``draft``: the drafter's model in
    the engine's own format, for "draft_model". ``methods``: those that will be asked for. ``max_len``: tokens of the
    longest request. ``batch``: requests that will run at once, at most.
    """

    model: str
    format: str = "bf16"
    draft: str | None = None
    methods: tuple[str, ...] = ("plain",)
    num_draft: int = 4
    threads: int = 2
    max_len: int = 1024
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Generated:
    """``seconds`` of one call; ``token_ids`` per prompt, without the prompts."""

    seconds: float
    token_ids: list[list[int]]


class Engine:
    """What an adapter implements. A method that is not overridden is unsupported."""

    def load(self, load: Load) -> dict[str, Any]:
        """Load; answer the versions that identify what was measured."""
        raise NotImplementedError

    def step(self, context: int, rows: int, repeat: int) -> list[float]:
        """Seconds of ``repeat`` passes over ``rows`` new tokens behind ``context`` cached ones, logits of every row."""
        raise Unsupported("passes are not measured")

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt of that many tokens, none of them cached, to the logits of its last one."""
        raise Unsupported("prefill is not measured")

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, method: str, temperature: float
    ) -> Generated:
        """Generate exactly ``tokens`` tokens for all prompts at once; no prompt is cached from an earlier call, nor
        anything of what was said then."""
        raise Unsupported("generation is not measured")

    def bandwidth(self) -> float:
        """Bytes per second read from memory with all threads."""
        raise Unsupported("has no probe")


def answer(engine: Engine, question: dict[str, Any]) -> Any:
    """Carry out one question; the keys besides "do" are the arguments."""
    arguments = {name: value for name, value in question.items() if name != "do"}
    what = question["do"]
    if what == "load":
        arguments["methods"] = tuple(arguments.get("methods", ("plain",)))
        return engine.load(Load(**arguments))
    if what == "generate":
        prompts, at_once = arguments.pop("prompts"), arguments.pop("at_once")
        made = [
            engine.generate(own, **arguments) for own in ([prompts] if at_once else [[p] for p in prompts])
        ]
        ids = [answered for one in made for answered in one.token_ids]
        return {"seconds": sum(one.seconds for one in made), "token_ids": ids}
    if what in ("step", "prefill", "bandwidth"):
        return getattr(engine, what)(**arguments)
    raise ValueError(f"unknown question {what!r}")


def serve(engine: Engine) -> None:
    """Answer questions from standard input until it ends. What libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        reply: dict[str, Any]
        try:
            reply = {"ok": answer(engine, json.loads(line))}
        except Unsupported as reason:
            reply = {"unsupported": str(reason)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
