"""Reads an answer as it comes: reasoning first, then text and calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwise.sampling.params import SamplingParams
from draftwise.sampling.structured import StructuredOutputs
from draftwise.server.context import Context
from draftwise.server.errors import bad_request
from draftwise.server.reasoning import ReasoningParser, Start, Thought, reasoning_class
from draftwise.server.tool_formats import CallPiece, ToolParser

Part = str | Thought | CallPiece


class AnswerReader:
    """Divides one answer. Without parsers everything is text."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str) -> list[Part]:
        """The next piece: what is certain, in its order."""
        if self._reasoning is None:
            return self._text(text)
        return self._divided(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        """The text ended."""
        out = [] if self._reasoning is None else self._divided(self._reasoning.finish())
        return out if self._tools is None else [*out, *self._tools.finish()]

    def _divided(self, parts: Sequence[str | Thought]) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Thought):
                out.append(part)
            else:
                out += self._text(part)
        return out

    def _text(self, text: str) -> list[Part]:
        if self._tools is None:
            return [text] if text else []
        return list(self._tools.push(text))


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Makes the readers of a request's answers, once its prompt is known."""

    reasoning: type[ReasoningParser] | None = None
    start: Start = "unknown"
    special_tokens: bool = (
        False  # marks are special tokens, which are left out of a text that does not ask for them
    )

    def parser(self) -> ReasoningParser | None:
        return None if self.reasoning is None else self.reasoning(self.start)

    def params(self, params: SamplingParams, budget: int | None = None) -> SamplingParams:
        """``params`` whose grammar holds for the answer and not for the reasoning before it. ``budget``: most tokens of
        reasoning. Raises APIError, RequestError."""
        spec = params.structured_outputs
        if self.reasoning is None or (spec is None and budget is None):
            return params
        if budget is not None and not self.reasoning.takes_budget:
            raise bad_request(
                "thinking_token_budget: not supported with this model's reasoning parser; use reasoning_effort",
                "thinking_token_budget",
                "unsupported_parameter",
            )
        marks = self.reasoning.grammar_marks(self.start) if spec is None or spec.after is None else {}
        if budget is not None and (marks or (spec is not None and spec.after is not None)):
            marks["within"] = budget
        if not marks:
            return params
        spec = StructuredOutputs(**marks) if spec is None else dataclasses.replace(spec, **marks)
        return params.replace(structured_outputs=spec)

    def counter(self, text: Callable[[int], str]) -> ThoughtCounter:
        """``text``: of a token."""
        return ThoughtCounter(self.parser(), text)

    def count(self, token_ids: Sequence[int], text: Callable[[int], str]) -> int:
        """How many of an answer's tokens are reasoning, its marks included. ``text``: of a token."""
        counter = self.counter(text)
        counter.add(token_ids)
        return counter.count


class ThoughtCounter:
    """Counts the tokens of an answer that are reasoning, as they come: counting all of them at the end would delay
    other streams."""

    def __init__(self, parser: ReasoningParser | None, text: Callable[[int], str]) -> None:
        self._parser = parser  # None: nothing more is reasoning
        self._text = text
        self._num_read = 0
        self._thinks = False

    @property
    def count(self) -> int:
        """The number of reasoning tokens so far, marks included."""
        return self._num_read if self._thinks else 0

    def add(self, token_ids: Sequence[int]) -> None:
        """The next tokens."""
        for token in token_ids:
            if self._parser is None:
                return
            found = self._parser.push(self._text(token))
            self._num_read += 1
            self._thinks = self._thinks or any(isinstance(part, Thought) for part in found)
            if self._parser.over:
                self._parser = None


def joined(parts: Sequence[Part]) -> tuple[str, str, list[CallPiece]]:
    """(reasoning, text, calls): in chat completions they have no order between them."""
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    text = "".join(part for part in parts if isinstance(part, str))
    return thoughts, text, [part for part in parts if isinstance(part, CallPiece)]


def reading_of(context: Context, prompt: Mapping[str, Any], continued: Mapping[str, Any] | None) -> Reading:
    """``prompt``: rendered; ``continued``: the message that the answer goes on with, if it does."""
    if context.config.reasoning_parser is None:
        return Reading()
    kind = reasoning_class(context.config.reasoning_parser)
    start = kind.start_of(
        prompt["prompt"], None if continued is None else str(continued.get("content") or "")
    )
    special = set(getattr(context.tokenizer, "all_special_tokens", ()))
    return Reading(kind, start, any(mark in special for mark in kind.marks))
