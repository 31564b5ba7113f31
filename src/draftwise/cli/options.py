"""Options that several commands share: those of the engine and those of sampling, made from the configs' fields."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from draftwise.cli.errors import UsageError
from draftwise.cli.numbers import boolean as boolean_flag
from draftwise.config import ENGINE_OPTIONS, EngineConfig
from draftwise.config.coerce import boolean
from draftwise.config.foreign import HARMLESS
from draftwise.config.resolve import ALIASES, OLD_SPECULATIVE

if TYPE_CHECKING:
    from draftwise.sampling.params import SamplingParams

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

ENGINE_BOOLEANS = tuple(
    f.name.replace("_", "-") for f in fields(EngineConfig) if f.metadata.get("to") is boolean
)
SAMPLING_BOOLEANS = ("ignore-eos", "include-stop-str-in-output", "skip-special-tokens", "detokenize")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_engine_options(
    parser: argparse.ArgumentParser, *, seed_flag: str = "--seed", several_names: bool = False
) -> None:
    """One flag per option of `EngineConfig`, the speculative ones, and hidden ones for other spellings.

    ``seed_flag``: a command that samples needs ``--seed`` for the request and names the engine's otherwise.
    ``several_names``: ``--served-model-name`` takes all names that follow it, as a list.
    """
    group = parser.add_argument_group("engine (- or _ in names; true/false may follow a switch)")
    for f in fields(EngineConfig):
        if f.name not in ENGINE_OPTIONS:
            continue
        flags = [_flag(f.name) if f.name != "seed" else seed_flag]
        if f.name == "model":
            flags.append("-m")
        switch = f.metadata["to"] is boolean
        metavar = "BOOL" if switch else f.metadata["metavar"] or f.name.rpartition("_")[2].upper()
        group.add_argument(
            *flags,
            dest=f"engine_{f.name}",
            metavar=metavar,
            help=f.metadata["help"].replace("%", "%%"),
            nargs="+" if several_names and f.name == "served_model_name" else None,
        )
    group.add_argument(
        "--speculative-config",
        dest="engine_speculative_config",
        action="append",
        metavar="JSON",
        help='a drafter, as {"method": ..., "model": ..., "num_speculative_tokens": ...}; again: one more',
    )
    for name, text in (
        ("speculative_model", "the draft model"),
        ("speculative_method", "ngram, draft_model, ... or none"),
        ("num_speculative_tokens", "draft tokens per step"),
    ):
        group.add_argument(
            _flag(name), dest=f"engine_{name}", metavar=name.rpartition("_")[2].upper(), help=text
        )
    for name in (*ALIASES, *HARMLESS):
        group.add_argument(_flag(name), dest=f"engine_{name}", help=argparse.SUPPRESS)


def engine_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as keywords of `LLM`."""
    names = (*ENGINE_OPTIONS, *OLD_SPECULATIVE, *ALIASES, *HARMLESS)
    out = {name: getattr(args, f"engine_{name}") for name in names}
    given = {name: value for name, value in out.items() if value is not None}
    if given.get("speculative_method") == "none" and "speculative_model" not in given:
        given.pop("speculative_method")
        given.pop("num_speculative_tokens", None)
        given["speculative_config"] = {"method": "none"}
    if args.engine_speculative_config:
        entries: list[Any] = []
        for text in args.engine_speculative_config:
            loaded = _json("--speculative-config", text)
            entries.extend(loaded if isinstance(loaded, list) else [loaded])
        given["speculative_config"] = [entry for entry in entries if entry is not None]
    return given


def split_names(given: Sequence[str]) -> list[str]:
    """Names that were separated by blanks or by commas.

    >>> split_names(["a,b", "c"])
    ['a', 'b', 'c']
    """
    return [name for part in given for name in part.split(",")]


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag}: not valid JSON ({error}): {text[:80]}") from None


def _ints(text: str) -> list[int]:
    """ "1,2,3" or "[1, 2, 3]"."""
    try:
        return [int(part) for part in text.strip("[] ").split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers separated by commas, got {text!r}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int = 128) -> None:
    """One flag per field of `SamplingParams` that makes sense on a command line."""
    group = parser.add_argument_group("sampling")

    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        metavar = more.pop("metavar", name.rpartition("_")[2].upper())
        group.add_argument(
            _flag(name), dest=f"sampling_{name}", type=kind, help=text, metavar=metavar, **more
        )

    add("max_tokens", int, f"most tokens to generate ({max_tokens})", default=max_tokens)
    add("min_tokens", int, "no end before this many tokens")
    add("temperature", float, "0: greedy (1.0)")
    add("top_p", float, "nucleus (1.0: off)")
    add("top_k", int, "number of most likely tokens to keep (0: off)")
    add("min_p", float, "least probability relative to the likeliest token (0: off)")
    add("seed", int, "same seed, same text")
    add("n", int, "samples per prompt (1)")
    add("stop", str, "stop before this text; may be repeated", action="append", metavar="TEXT")
    add("stop_token_ids", _ints, "stop at these tokens: 1,2,3")
    add("ignore_eos", boolean_flag, "go on after the end-of-sequence token", metavar="BOOL")
    add("include_stop_str_in_output", boolean_flag, "keep the stop text", metavar="BOOL")
    add("presence_penalty", float, "subtracted from tokens in the output (0)")
    add("frequency_penalty", float, "subtracted per occurrence in the output (0)")
    add("repetition_penalty", float, "divides logits of tokens seen in prompt or output (1)")
    add("logit_bias", _object, 'JSON: {"token id": bias}')
    add("bad_words", str, "never generate this text; may be repeated", action="append", metavar="TEXT")
    add("allowed_token_ids", _ints, "only these tokens: 1,2,3")
    add("logprobs", int, "log-probabilities of this many alternatives per token (with --json)", metavar="N")
    add("prompt_logprobs", int, "the same for the prompt's tokens (with --json)", metavar="N")
    add("skip_special_tokens", boolean_flag, "leave special tokens out of the text (true)", metavar="BOOL")
    add("detokenize", boolean_flag, "make text of the tokens (true)", metavar="BOOL")
    add(
        "structured_outputs",
        _object,
        'JSON: {"json": schema}, {"regex": ...}, {"choice": [...]}, {"grammar": ...} or {"json_object": true}',
        metavar="JSON",
    )
    add(
        "speculation",
        _object,
        'JSON: {"method": ..., "num_speculative_tokens": ..., "rule": ...} for these requests',
        metavar="JSON",
    )


def sampling_params(args: argparse.Namespace, **more: Any) -> SamplingParams:
    """The `SamplingParams` of the flags that were given; ``more`` fields override them."""
    from draftwise.sampling.params import SamplingParams

    given = {
        name.removeprefix("sampling_"): value
        for name, value in vars(args).items()
        if name.startswith("sampling_") and value is not None
    }
    return SamplingParams.from_dict({**given, **more})
