"""``draftwise demo``: a guided look at speculative decoding on the embedded models."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from draftwise.cli.numbers import positive
from draftwise.cli.options import ENGINE_BOOLEANS, add_engine_options, engine_kwargs
from draftwise.cli.report import print_json
from draftwise.cli.tables import table

if TYPE_CHECKING:
    from draftwise import LLM, RequestOutput
    from draftwise.cli.options import Subparsers

BOOLEANS = ENGINE_BOOLEANS

PROMPT = """def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('-v', '--verbose', action='store_true',
                        help='print more')
    parser.add_argument('-q', '--quiet',"""


_WHAT = {
    "none": "nothing: a token a step",
    "mtp": "a layer on the target",
    "eagle3": "a layer on the target",
    "eagle": "a layer on the target",
    "medusa": "heads on the target",
    "draft_model": "a smaller model",
    "ngram": "look-up in this text",
    "suffix": "look-up, earlier texts",
    "early_exit": "the target's first half",
    "hybrid": "look-up, then a model",
}
"""A method's description in a few words, for the table."""


def add_parser(subparsers: Subparsers) -> None:
    """Register ``demo``."""
    parser = subparsers.add_parser(
        "demo",
        usage="draftwise demo [options]",
        help="see speculative decoding at work on the embedded models",
        description="Generate the same code plainly and with each drafter, side by side.",
    )
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to continue (a small class)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="tokens to generate (96)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="times each way is timed (3)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise demo``."""
    from draftwise import LLM

    start = time.perf_counter()
    options = engine_kwargs(args)
    options.setdefault("speculation_control", "static")  # what each method does, not when it pays
    with LLM(keep_trace=True, **options) as llm:
        loaded = time.perf_counter() - start
        methods = ["none", *(spec.method for spec in llm.config.drafters)]
        outputs, seconds = _generate(llm, methods, args)
        if args.json:
            print_json(_as_dict(outputs, seconds, loaded))
        else:
            _show(llm, args.prompt, outputs, seconds, loaded)
    return 0


def _generate(
    llm: LLM, methods: list[str], args: argparse.Namespace
) -> tuple[dict[str, RequestOutput], dict[str, float]]:
    """Greedy output and best time of each method; methods alternate."""
    from draftwise import SamplingParams

    outputs: dict[str, RequestOutput] = {}
    seconds: dict[str, float] = {}
    for turn in range(args.rounds + 1):
        for method in methods:
            params = SamplingParams(
                temperature=0,
                max_tokens=8 if turn == 0 else args.max_tokens,  # the first turn only warms up
                speculation={"method": method},
            )
            llm.reset_prefix_cache()
            llm.reset_drafters()
            start = time.perf_counter()
            (output,) = llm.generate(args.prompt, params, use_tqdm=False)
            elapsed = time.perf_counter() - start
            if turn > 0:
                outputs[method] = output
                seconds[method] = min(elapsed, seconds.get(method, elapsed))
    return outputs, seconds


def _as_dict(outputs: dict[str, RequestOutput], seconds: dict[str, float], loaded: float) -> dict[str, Any]:
    plain = outputs["none"].outputs[0].token_ids
    methods = []
    for method, output in outputs.items():
        tokens = output.outputs[0].token_ids
        methods.append(
            {
                "method": method,
                "tokens": len(tokens),
                "seconds": seconds[method],
                "tokens_per_second": len(tokens) / seconds[method],
                "speedup": (len(tokens) / seconds[method]) / (len(plain) / seconds["none"]),
                "equal_tokens": tokens == plain,
                "speculation": output.metrics.speculation.as_dict(),
            }
        )
    return {"load_seconds": loaded, "text": outputs["none"].outputs[0].text, "methods": methods}


def _show(
    llm: LLM, prompt: str, outputs: dict[str, RequestOutput], seconds: dict[str, float], loaded: float
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    facts = _as_dict(outputs, seconds, loaded)
    name = "the embedded demo model" if llm.config.embedded else str(llm.config.model)
    console.print(f"Loaded {name} and its drafters in {loaded:.1f} s. It continues this:\n")
    console.print(Text(prompt, style="dim"))
    default = llm.config.default_method
    shown = default if default in outputs else list(outputs)[-1]
    console.print(f"\nWith {shown}; [green]green[/green] tokens were guessed by the drafter and confirmed:\n")
    console.print(_coloured(llm, outputs[shown]))
    lines = []
    for row in facts["methods"]:
        speculation = row["speculation"]
        length = speculation["mean_acceptance_length"]
        lines.append(
            [
                "plain" if row["method"] == "none" else row["method"],
                _WHAT.get(row["method"], ""),
                f"{row['tokens_per_second']:.0f}",
                f"{row['speedup']:.2f}x",
                str(sum(speculation["steps_by_method"].values())),
                "" if length is None else f"{length:.2f}",
                "yes" if row["equal_tokens"] else "NO",
            ]
        )
    columns = ["<method", "<what guesses", "tokens\nper s", "speed\n-up", "target\nsteps"]
    columns += ["accept.\nlength", "same\ntext"]
    print("\n" + table("The same text, by every method:", columns, lines))
    print(
        "\naccept. length: tokens from one step of the target in which drafts were checked.\n"
        'Next: draftwise generate "def main(" --temperature 0\n      draftwise bench latency'
    )


def _coloured(llm: LLM, output: RequestOutput) -> Any:
    """The text, with accepted drafts in green as far as the trace reaches."""
    from rich.text import Text

    completion = output.outputs[0]
    tokenizer = llm.get_tokenizer()
    text = Text()
    if completion.trace is None:
        return Text(completion.text)
    done: list[int] = []
    before = ""
    limit = len(completion.token_ids)
    for step in completion.trace:
        # The last token of a step is the target's own; those before it are accepted drafts.
        for index, token in enumerate(step.token_ids):
            if len(done) == limit:
                break
            done.append(token)
            now = tokenizer.decode(done, skip_special_tokens=True)
            if now.endswith("\ufffd"):
                continue  # half a character: shown with the token that completes it
            text.append(now[len(before) :], style="green" if index < len(step.token_ids) - 1 else "")
            before = now
    return text
