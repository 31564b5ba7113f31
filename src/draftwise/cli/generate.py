"""``draftwise generate``: continue prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.cli.errors import UsageError
from draftwise.cli.inputs import decode, read_stdin
from draftwise.cli.options import (
    ENGINE_BOOLEANS,
    SAMPLING_BOOLEANS,
    add_engine_options,
    add_sampling_options,
    engine_kwargs,
    sampling_params,
)
from draftwise.cli.report import loading, note, output_as_dict, print_json, progress, statistics_line
from draftwise.errors import RequestError

if TYPE_CHECKING:
    from draftwise import AsyncLLM, RequestOutput, SamplingParams
    from draftwise.cli.options import Subparsers

BOOLEANS = (*ENGINE_BOOLEANS, *SAMPLING_BOOLEANS)

_EXAMPLES = """examples:
  draftwise generate "def fibonacci(n):" --temperature 0
  draftwise generate --model path/to/model --speculative-method ngram "The future of AI is"
  draftwise generate --file prompts.jsonl --json > answers.jsonl
  git diff | draftwise generate - --max-tokens 64
"""


def add_parser(subparsers: Subparsers) -> None:
    """Register ``generate``."""
    parser = subparsers.add_parser(
        "generate",
        help="continue prompts, streaming to the terminal",
        description="Continue prompts. One prompt is streamed as it is generated; several run together.",
        epilog=_EXAMPLES,
        usage="draftwise generate [options] [PROMPT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; - reads one from stdin")
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="PATH",
        help='.jsonl: {"prompt": ...} or {"prompt_token_ids": [...]} per line; any other: one prompt',
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt on stdout")
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    add_sampling_options(parser)
    add_engine_options(parser, seed_flag="--engine-seed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise generate``."""
    prompts = read_prompts(args.prompts, args.file)
    if not prompts:
        raise UsageError("no prompt given: pass one as an argument, --file PATH, or - for stdin")
    params = sampling_params(args)
    options = engine_kwargs(args)
    from draftwise import AsyncLLM

    async def work() -> int:
        with loading(options.get("model")):
            llm = AsyncLLM(**options)
        async with llm:
            if len(prompts) == 1 and params.n == 1 and not args.json:
                return await _stream(llm, prompts[0], params, echo=args.echo)
            return await _together(llm, prompts, params, as_json=args.json, echo=args.echo)

    return asyncio.run(work())


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[Any]:
    """Prompts from arguments, then from files, in order. Raises UsageError for files that cannot be read."""
    prompts: list[Any] = []
    for text in texts:
        if text == "-":
            prompts.append(read_stdin())
        else:
            prompts.append(text)
    for name in files:
        try:
            data = Path(name).read_bytes()
        except OSError as error:
            raise UsageError(f"--file {name}: {error.strerror}") from None
        text = decode(data, name)
        if name.endswith(".jsonl"):
            prompts.extend(_json_lines(text, name))
        else:
            prompts.append(text)
    return prompts


def _json_lines(text: str, name: str) -> list[Any]:
    prompts: list[Any] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{name}, line {number}: not valid JSON ({error})") from None
        if not isinstance(value, dict) or not {"prompt", "prompt_token_ids"} & set(value):
            raise UsageError(
                f'{name}, line {number}: expected {{"prompt": ...}} or {{"prompt_token_ids": [...]}}'
            )
        prompts.append(value)
    return prompts


async def _stream(llm: AsyncLLM, prompt: Any, params: SamplingParams, *, echo: bool) -> int:
    """Print the text as it comes, then one line of statistics on stderr."""
    if echo and isinstance(prompt, str):
        print(prompt, end="", flush=True)
    start = time.perf_counter()
    last: RequestOutput | None = None
    shown = 0
    async for last in llm.generate(prompt, params):
        text = last.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(flush=True)
    assert last is not None
    note(statistics_line([last], time.perf_counter() - start))
    return _report_errors([last])


async def _together(
    llm: AsyncLLM, prompts: Sequence[Any], params: SamplingParams, *, as_json: bool, echo: bool
) -> int:
    """Run all prompts at once. Print answers in the order of the prompts, each as soon as it can be.

    A refused prompt fails alone; the exit code is then 2.
    """
    start = time.perf_counter()
    final = params.replace(output_kind="final_only")
    outputs: list[RequestOutput] = []
    refused = 0

    async def one(prompt: Any) -> RequestOutput | RequestError:
        try:
            async for output in llm.generate(prompt, final):
                last = output
            return last
        except RequestError as error:
            return error
        finally:
            advance("")

    with progress(len(prompts), "prompts") as advance:
        tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
        for index, task in enumerate(tasks):
            result = await task
            if isinstance(result, RequestError):
                refused += 1
                note(f"draftwise: prompt {index}: {result}")
                if as_json:
                    print_json({"index": index, "error": str(result)})
                continue
            outputs.append(result)
            if as_json:
                print_json({"index": index, **output_as_dict(result)})
            else:
                _print_samples(index, result, echo=echo)
    if outputs:
        note(statistics_line(outputs, time.perf_counter() - start))
    return 2 if refused else _report_errors(outputs)


def _print_samples(index: int, output: RequestOutput, *, echo: bool) -> None:
    for sample in output.outputs:
        name = f"prompt {index}" + (f", sample {sample.index}" if len(output.outputs) > 1 else "")
        print(f"--- {name}")
        print((output.prompt or "" if echo else "") + sample.text, flush=True)


def _report_errors(outputs: Sequence[RequestOutput]) -> int:
    failed = [c for out in outputs for c in out.outputs if c.finish_reason == "error"]
    for completion in failed:
        note(f"draftwise: generation failed: {completion.error}")
    return 1 if failed else 0
