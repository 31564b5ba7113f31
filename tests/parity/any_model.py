"""What becomes of an architecture: equal to Transformers, or refused; and the table of that in docs/models.md.

    python -m tests.parity.any_model

writes the table and `equal_architectures.txt`, the list of what must stay equal.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftwise import LLM, SamplingParams
from draftwise.engine import device
from draftwise.errors import ModelLoadError, RequestError
from draftwise.models import loader
from draftwise.models.base import DecoderModel
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.loader import load_model
from draftwise.models.registry import resolve_model
from tests.fakes import recurrent_kinds
from tests.fakes.architectures import KINDS, WRAPPERS, CannotMake, save, small

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).parent / "equal_architectures.txt"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- architectures: begin -->\n", "<!-- architectures: end -->\n"

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "ngram": {"method": "ngram"},
    "draft = target": {"method": "draft_model"},
    "tree": {"method": "draft_model", "speculative_token_tree": [[0], [1], [0, 0]]},
}
LENGTH, SHORT = 30, 14
"""Tokens that are compared; of the quick tests, which fill a block and begin another one all the same."""
LIMIT = 1e-3
"""Of log-probabilities in float32, in nats."""
WAYS = (
    "own code",
    "own operations, put together from what Transformers' code does",
    "Transformers' code, attention on own kernels",
    "Transformers' code, its own attention over our cache",
)


@dataclass(frozen=True)
class Outcome:
    """``way``: one of `WAYS`, "refused", or "" where no small model can be made. ``words``: why; of models on
    Transformers' code, why they are not put together from our operations."""

    kind: str
    architecture: str
    way: str
    words: str = ""


def prompts() -> list[list[int]]:
    return [[(3 + 7 * i + j * (i + 2)) % 250 + 3 for j in range(9 + 14 * i)] for i in range(3)]


def outcome(kind: str, folder: Path, *, wrapper: bool = False, length: int = LENGTH) -> Outcome:
    """Load the architecture and compare ``length`` greedy tokens of three prompts in one batch and in chunks, plainly,
    with look-ups, with the model as its own drafter and with trees, and log-probabilities of prompts and answers.

    Raises:
        AssertionError: it is served, and not equal; or refused without words.
    """
    try:
        made = small(kind, wrapper=wrapper)
    except CannotMake as error:
        return _unmade(kind, str(error))
    save(made, folder)
    drafters = [
        {"method": "ngram"},
        {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3},
    ]
    try:
        with _said() as said, _loaded_once():
            llm = LLM(
                str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, num_kv_blocks=40,
                max_num_batched_tokens=24, speculative_config=drafters, speculation_control="static",
            )  # fmt: skip
    except ModelLoadError as error:
        words = str(error).replace(str(folder), "").lstrip(": ")
        if made.model is None and ("no file named" in words or "has no weights" in words):
            return Outcome(
                kind, made.architecture, "", "it would be served or refused by its weights, which are large"
            )
        assert len(words.split()) > 5 and "Traceback" not in words, words
        return Outcome(kind, made.architecture, "refused", words)
    with llm:
        wanted: list[tuple[list[int], torch.Tensor]] = []
        assert llm._engine is not None
        model = llm._engine.model
        recurrent = {kind, f"{kind}_text"} & recurrent_kinds.KINDS
        assert wrapper or (model.state_spec() is not None) == bool(recurrent)
        for name, speculation in METHODS.items():
            if name == "tree" and model.state_spec() is not None:
                with pytest.raises(RequestError, match="recurrent state"):
                    llm.generate([{"prompt_token_ids": [3]}], SamplingParams(speculation=speculation))
                continue
            params = SamplingParams(
                temperature=0,
                max_tokens=length,
                ignore_eos=True,
                speculation=speculation,
                logprobs=0,
                prompt_logprobs=0,
            )
            found = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
            answers = [list(output.outputs[0].token_ids) for output in found]
            if not wanted:
                wanted = [
                    _greedy(made.model, prompt, tokens)
                    for prompt, tokens in zip(prompts(), answers, strict=True)
                ]
            for output, prompt, (tokens, logprobs) in zip(found, prompts(), wanted, strict=True):
                assert len(tokens) == length and list(output.outputs[0].token_ids) == tokens, name
                assert output.prompt_logprobs is not None
                for i, position in enumerate(output.prompt_logprobs[1:]):
                    assert position is not None
                    (one,) = position.values()
                    assert abs(one.logprob - float(logprobs[i, prompt[i + 1]])) < LIMIT, name
                # small models repeat themselves: keys in a wrong place show here, where the text stays the same
                assert output.outputs[0].logprobs is not None
                for i, said_here in enumerate(output.outputs[0].logprobs):
                    likely = float(logprobs[len(prompt) - 1 + i, tokens[i]])
                    assert abs(said_here[tokens[i]].logprob - likely) < LIMIT, name
        llm.check_integrity()
        inner = getattr(model, "inner", model)  # of a recorded one
        way, words = WAYS[1] if isinstance(inner, AssembledDecoder) else WAYS[0], ""
        if isinstance(inner, GeneralDecoder):
            way = f"Transformers' code, {inner.way.name}"
            words = said[0] if said else "its attention is its own"
            if model.state_spec() is not None:
                words = "it keeps a recurrent state"
    return Outcome(kind, made.architecture, way, words)


@contextmanager
def _loaded_once() -> Iterator[None]:
    """The drafter is the very model that is the target: to load and check it twice would take longest of all."""
    made: list[DecoderModel] = []

    def load(*args: Any, **options: Any) -> DecoderModel:
        if not made:
            made.append(load_model(*args, **options))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "load_model", load)
        patch.setattr(loader, "load_model", load)
        yield


@contextmanager
def _said() -> Iterator[list[str]]:
    """Why models are not put together: what the log says of it."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if " runs on Transformers' code: " in text:
                found.append(text.split(" runs on Transformers' code: ")[1])

    logger, listener, disabled = logging.getLogger("draftwise"), Listener(), logging.root.manager.disable
    level, propagate = logger.level, logger.propagate
    logging.disable(logging.NOTSET)
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    logger.propagate = propagate and disabled == logging.NOTSET
    try:
        yield found
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate
        logging.disable(disabled)


def _unmade(kind: str, words: str) -> Outcome:
    """What is refused by its name needs no model."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")
    try:
        _, cls = resolve_model({"architectures": [architecture]})
        cls.parse({"model_type": kind}, architecture)
    except ModelLoadError as error:
        if "cannot be served" in str(error):
            return Outcome(kind, architecture, "refused", str(error))
    return Outcome(kind, architecture, "", words)


def _greedy(model: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    """The likeliest token behind the prompt, and behind every one of ``tokens`` but the last; log-probabilities [all
    tokens, V] behind each. Who said the likeliest ones said what greedy decoding says, token by token, in one pass."""
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist(), logits.log_softmax(-1)


def table(outcomes: list[Outcome], what: str) -> str:
    """Markdown: who is served, by name, and who is refused, by reason."""
    import transformers

    ways: dict[str, list[str]] = {}
    for found in outcomes:
        ways.setdefault(found.way, []).append(found.kind)
    reasons: dict[str, list[str]] = {}
    for found in outcomes:
        if found.way == "refused":
            words = found.words.split("cannot be served: ")[-1]
            words = "layers of " + words.split(" has layers of ")[1] if " has layers of " in words else words
            reasons.setdefault(words.replace("|", "/").replace("\n", " "), []).append(found.kind)
    lines = [
        f"Transformers {transformers.__version__} has {len(outcomes)} kinds of {what}. "
        f"{sum(len(ways.get(way, [])) for way in WAYS)} are equal:",
        "",
    ]
    for way in WAYS:
        if way in ways:
            lines += [f"- {way}: " + ", ".join(f"`{kind}`" for kind in ways[way])]
    causes: dict[str, list[str]] = {}
    for found in outcomes:
        if found.way in WAYS[2:]:
            causes.setdefault(found.words, []).append(found.kind)
    if causes:
        lines += ["", "| not put together | why |", "|---|---|"]
        by_number = sorted(causes.items(), key=lambda cause: (-len(cause[1]), cause[1]))
        lines += [f"| {', '.join(kinds)} | {words} |" for words, kinds in by_number]
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [
        f"| {', '.join(kinds)} | {words} |" for words, kinds in sorted(reasons.items(), key=lambda r: r[1])
    ]
    lines += ["", "Not tried, because no small configuration is known: " + ", ".join(ways.get("", [])) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    logging.disable(logging.WARNING)
    parts = []
    equal: list[str] = []
    for kinds, wrapper, what in (
        (KINDS, False, "causal models"),
        (
            WRAPPERS,
            True,
            "models of images or sound and text, some of them above, too, as their text part alone",
        ),
    ):
        outcomes = []
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                found = outcome(kind, Path(folder, "model"), wrapper=wrapper)
            outcomes.append(found)
            print(
                f"{kind:26} {found.way:20} {found.words[:160]}".replace("\n", " "),
                file=sys.stderr,
                flush=True,
            )
        equal += [listed(o.kind, wrapper) for o in outcomes if o.way not in ("", "refused")]
        parts.append(table(outcomes, what))
    LIST.write_text("\n".join(equal) + "\n")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(parts) + "\n" + END + rest.split(END)[1])


def listed(kind: str, wrapper: bool) -> str:
    """How `LIST` names it."""
    return f"text:{kind}" if wrapper else kind


if __name__ == "__main__":
    main()
