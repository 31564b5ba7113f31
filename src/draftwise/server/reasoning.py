"""Finds the reasoning before an answer: one parser per form in which models mark it.

A parser takes the text in pieces and divides it into thoughts and the answer, as soon as it is certain which of them a
piece is. Names are those of vLLM's ``--reasoning-parser``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

from draftwise.errors import ConfigError, suggest
from draftwise.server.marks import begun, until

_LONGEST_HEADER = 1024
"""Characters of a header that are looked at again and again until it is complete."""


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


Divided = list[str | Thought]
"""Answer and reasoning in their order."""

Start = Literal["open", "closed", "unknown"]
"""The state after the prompt: the model is thinking already, it will not think, or unknown."""


class ReasoningParser(ABC):
    """The reader of one answer's reasoning."""

    marks: ClassVar[tuple[str, ...]]
    """The marks that divide the text. If they are special tokens, they must be in the text."""
    takes_budget: ClassVar[bool] = True
    """Whether the closing mark alone ends the reasoning, so that it can be written when a budget is spent."""

    @abstractmethod
    def __init__(self, start: Start = "unknown") -> None: ...

    @classmethod
    @abstractmethod
    def start_of(cls, prompt: str, continued: str | None = None) -> Start:
        """The state at the end of a prompt; ``continued``: the answer that it goes on with, if it does."""

    @classmethod
    @abstractmethod
    def grammar_marks(cls, start: Start) -> dict[str, Any]:
        """Where a grammar begins, as fields of `StructuredOutputs`; nothing: at the start of the text."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether all that follows is the answer."""

    @abstractmethod
    def push(self, piece: str) -> Divided:
        """The next piece of text."""

    @abstractmethod
    def finish(self) -> Divided:
        """The text ended."""


class MarkedReasoning(ReasoningParser):
    """Reasoning between an opening and a closing mark, in front of the answer.

    White space around reasoning is dropped. Where it is left open (``assumed``), models begin to think without the
    opening mark. Example (``<think>``): "<think>\\nHm", "m</th", "ink>\\n\\nYes" gives thoughts "Hm", "m", then "Yes".
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]]
    assumed: ClassVar[bool] = False

    def __init__(self, start: Start = "unknown") -> None:
        self._held = ""
        self._part = {"open": "begun", "closed": "answer", "unknown": "start"}[start]
        # start: is there an opening mark? begun: white space before the first thought. thoughts. behind: white space
        # before the answer. answer.

    @classmethod
    def start_of(cls, prompt: str, continued: str | None = None) -> Start:
        if continued is not None:
            opened = max(continued.rfind(mark) for mark in cls.opens)
            closed = max(continued.rfind(mark) for mark in cls.closes)
            if opened > closed:
                return "open"
            return "closed" if continued.strip() else "unknown"
        end = prompt.rstrip()
        if end.endswith(cls.opens):
            return "open"
        return "closed" if end.endswith(cls.closes) else "unknown"

    @classmethod
    def grammar_marks(cls, start: Start) -> dict[str, Any]:
        if start == "closed":
            return {}
        if start == "open" or cls.assumed:
            return {"after": cls.closes}
        return {"after": cls.closes, "opened_by": cls.opens[0]}

    @property
    def over(self) -> bool:
        return self._part in ("behind", "answer")

    def push(self, piece: str) -> Divided:
        self._held += piece
        out: Divided = []
        if self._part == "start":
            held = self._held.lstrip()
            mark = next((mark for mark in self.opens if held.startswith(mark)), None)
            if mark is not None:
                self._held, self._part = held[len(mark) :], "begun"
            elif any(mark.startswith(held) for mark in self.opens):
                return out
            else:
                self._part = "begun" if self.assumed else "answer"
        if self._part == "begun":
            self._held = self._held.lstrip()
            if self._held:
                self._part = "thoughts"
        if self._part == "thoughts":
            thought, mark, self._held = until(self._held, self.closes)
            if thought:
                out.append(Thought(thought))
            if mark is not None:
                self._part = "behind"
        if self._part == "behind":
            self._held = self._held.lstrip()
            if self._held:
                self._part = "answer"
        if self._part == "answer" and self._held:
            out.append(self._held)
            self._held = ""
        return out

    def finish(self) -> Divided:
        held, self._held = self._held, ""
        if not held or self._part == "behind":
            return []
        return [Thought(held)] if self._part in ("begun", "thoughts") else [held]


class ThinkReasoning(MarkedReasoning):
    """``<think>...</think>``: Qwen 3, GLM 4.5 and many others."""

    opens, closes = ("<think>",), ("</think>",)
    marks = ("<think>", "</think>")


class DeepSeekReasoning(ThinkReasoning):
    """DeepSeek R1 and models trained on it, MiniMax M2: they always think, often without ``<think>``."""

    assumed = True


class MistralReasoning(MarkedReasoning):
    """``[THINK]...[/THINK]``: Magistral."""

    opens, closes = ("[THINK]",), ("[/THINK]",)
    marks = ("[THINK]", "[/THINK]")


class SeedReasoning(MarkedReasoning):
    """Seed-OSS."""

    opens, closes = ("<seed:think>",), ("</seed:think>",)
    marks = ("<seed:think>", "</seed:think>")


class GraniteReasoning(MarkedReasoning):
    """Granite 3.2 and 3.3 write it out."""

    opens = ("Here is my thought process:", "Here's my thought process:")
    closes = ("Here is my response:", "Here's my response:")
    marks = (*opens, *closes)


class HarmonyReasoning(ReasoningParser):
    """GPT-OSS (https://github.com/openai/harmony): messages in channels.

    ``<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes``: the analysis is
    reasoning. A message to somebody (``<|channel|>commentary to=functions.f ...<|message|>{...}``) is left as it is,
    with its marks, for the parser of tool calls; other commentary is part of the answer.
    """

    START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
    ENDS: ClassVar[tuple[str, ...]] = ("<|end|>", "<|return|>", "<|call|>")
    FINAL = "<|channel|>final<|message|>"
    takes_budget = False  # calls stand between reasoning and the answer, and would count
    marks = (START, CHANNEL, MESSAGE, *ENDS, "<|constrain|>")

    def __init__(self, start: Start = "unknown") -> None:
        self._held = ""
        self._kind = "answer" if start == "closed" else "thought" if start == "open" else "header"
        self._final = start == "closed"

    @classmethod
    def start_of(cls, prompt: str, continued: str | None = None) -> Start:
        end = prompt.rstrip()
        if end.endswith("<|channel|>analysis<|message|>"):
            return "open"
        return "closed" if end.endswith(cls.FINAL) or continued else "unknown"

    @classmethod
    def grammar_marks(cls, start: Start) -> dict[str, Any]:
        return {} if start == "closed" else {"after": (cls.FINAL,)}

    @property
    def over(self) -> bool:
        return self._final

    def push(self, piece: str) -> Divided:
        self._held += piece
        out: Divided = []
        while self._held:
            if self._kind == "header":
                begins = self._header(out)
                if not begins:
                    break
                continue
            text, found, self._held = self._body()
            if text:
                out.append(Thought(text) if self._kind == "thought" else text)
            if not found:
                break
            self._kind = "header"
        return out

    def _header(self, out: Divided) -> bool:
        """Read up to the message; whether it has begun."""
        held = self._held.lstrip()
        marks = (self.START, self.CHANNEL)
        if not held.startswith(marks):
            if any(mark.startswith(held) for mark in marks):
                return False
            self._kind = "answer"  # text without a header
            return True
        at = held.find(self.MESSAGE)
        if at < 0:
            if len(held) > _LONGEST_HEADER:
                self._kind = "answer"  # no header goes on like this
            return len(held) > _LONGEST_HEADER
        channel = held[:at].partition(self.CHANNEL)[2]
        name = channel.replace("<", " ").split()[0] if channel.strip() else ""
        self._held = held[at + len(self.MESSAGE) :]
        if "to=" in held[:at]:  # before or behind the channel: one form for the parser of calls
            whom = held[:at].partition("to=")[2].replace("<", " ").split()
            self._kind = "call"
            out.append(f"{self.CHANNEL}commentary to={whom[0] if whom else ''} {self.MESSAGE}")
        else:
            self._kind = "thought" if name == "analysis" else "answer"
            self._final = name == "final"
        return True

    def _body(self) -> tuple[str, bool, str]:
        """(more of the message, whether it ended, what is left); a call keeps the mark of its end."""
        ats = [(at, mark) for mark in self.ENDS if (at := self._held.find(mark)) >= 0]
        if ats:
            at, mark = min(ats)
            end = at + len(mark)
            return self._held[: end if self._kind == "call" else at], True, self._held[end:]
        cut = len(self._held) - begun(self._held, self.ENDS)
        return self._held[:cut], False, self._held[cut:]

    def finish(self) -> Divided:
        held, self._held = self._held, ""
        if not held or (self._kind == "header" and held.lstrip().startswith((self.START, self.CHANNEL))):
            return []
        return [Thought(held)] if self._kind == "thought" else [held]


REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekReasoning,
    "deepseek_v3": ThinkReasoning,
    "ernie45": DeepSeekReasoning,
    "glm45": ThinkReasoning,
    "granite": GraniteReasoning,
    "holo2": ThinkReasoning,
    "hunyuan_a13b": ThinkReasoning,
    "minimax_m2": DeepSeekReasoning,
    "mistral": MistralReasoning,
    "olmo3": DeepSeekReasoning,
    "openai_gptoss": HarmonyReasoning,
    "qwen3": ThinkReasoning,
    "seed_oss": SeedReasoning,
    "step3": DeepSeekReasoning,
}
"""Names are vLLM's."""


def reasoning_class(name: str) -> type[ReasoningParser]:
    """Raises ConfigError for a name that is not there."""
    if name not in REASONING_PARSERS:
        names = ", ".join(REASONING_PARSERS)
        raise ConfigError(
            f"reasoning_parser: expected one of {names}, got {name!r}{suggest(name, REASONING_PARSERS)}"
        )
    return REASONING_PARSERS[name]
