"""Output of commands besides their result: one-line statistics, progress on a terminal, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from draftwise import RequestOutput


def note(text: str) -> None:
    """A line for people, on stderr, so that the result on stdout can be piped."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def statistics_line(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Tokens, tokens per second, mean acceptance length, method.

    "128 tokens in 0.31 s (413 tokens/s, first after 24 ms), 2.61 tokens per draft step (draft_model)"
    """
    tokens = sum(len(c.token_ids) for out in outputs for c in out.outputs)
    rate = f"{tokens / seconds:.0f} tokens/s" if seconds > 0 else "?"
    if len(outputs) == 1 and outputs[0].metrics.ttft is not None:
        rate += f", first after {1000 * outputs[0].metrics.ttft:.0f} ms"
    speculation = [out.metrics.speculation for out in outputs]
    drafts = sum(s.num_drafts for s in speculation)
    accepted = sum(s.num_accepted_tokens for s in speculation)
    methods = sorted({m for s in speculation for m in s.steps_by_method if m != "none"})
    length = f"mean acceptance length {1 + accepted / max(drafts, 1):.2f} ({', '.join(methods)})"
    how = length if drafts else "no speculation"
    return f"{tokens} tokens in {seconds:.2f} s ({rate}), {how}"


def output_as_dict(output: RequestOutput) -> dict[str, Any]:
    """A finished output for ``--json``."""
    completions = []
    for c in output.outputs:
        entry: dict[str, Any] = {
            "index": c.index,
            "text": c.text,
            "token_ids": list(c.token_ids),
            "finish_reason": c.finish_reason,
            "stop_reason": c.stop_reason,
        }
        if c.error is not None:
            entry["error"] = c.error
        if c.logprobs is not None:
            entry["cumulative_logprob"] = c.cumulative_logprob
            entry["logprobs"] = [_logprobs(position) for position in c.logprobs]
        completions.append(entry)
    out: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": completions,
        "metrics": output.metrics.as_dict(),
    }
    if output.prompt_logprobs is not None:
        out["prompt_logprobs"] = [None if p is None else _logprobs(p) for p in output.prompt_logprobs]
    return out


def _logprobs(position: Any) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": entry.logprob, "rank": entry.rank, "token": entry.decoded_token}
        for token, entry in position.items()
    ]


@contextmanager
def loading(model: object) -> Iterator[None]:
    """Show on a terminal that a model is loading, and for how long. Shows nothing if loading takes only a moment."""
    if model is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("loading {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(str(model), total=None)
        yield


@contextmanager
def progress(total: int, text: str, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr. The yielded function moves it by one and sets its text. No bar if stderr is no
    terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda label: bar.update(task, advance=1, description=label or text)
