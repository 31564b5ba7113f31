"""What the engine's own Python takes per round, beside model passes and kernels.

    python benchmarks/host_time.py [--requests 1 16 64 256] [--methods none ngram mtp eagle3:tree] [--steps 40] [--json]
                                   [--one-by-one] [--beside prompt|logprobs] [--rounds N]

Time of the calling thread alone (`time.thread_time`), less what it spends in the target's pass, the drafter's passes
and the native verification: what a busy neighbour takes from the clock is not in it. Where one native call packs a
drafter's rows, runs its passes and writes its drafts down, the whole call is left out. Of a call that computes whole
rounds (docs/architecture.md, Rounds), what it spends on passes and verification by the clock is left out. The embedded
model with its drafters, prompts of 32 tokens from its held-out text, static control, K = 4. ``METHOD:tree`` drafts a
static tree of six nodes. Medians over steps in which every request decodes, divided by their rounds, and the quickest.
``per request``: the median divided by the requests. ``--rounds N``: rounds_per_step.

``--beside prompt``: one of the requests is still having its prompt computed, a part in each step.
``--beside logprobs``: four of them, or all if they are fewer, want log-probabilities.

``--one-by-one``: go request by request, as steps do that are not ordinary (docs/architecture.md, Columns). To compare
two versions, run them in turns, each with its own source tree as PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from draftwise import LLM, SamplingParams
from draftwise.bench.workloads import code_prompts
from draftwise.kernels.cpu.library import NativeLibrary

PROMPT = 32
WARM_STEPS = 4
PART = 16
LONG = 900
"""Tokens of a prompt that is computed beside other requests, and rows of a step beyond those of the others."""
REPORTED = 4
"""Requests that want log-probabilities beside others."""
K = 4
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
MOST = {"medusa": 3}
"""Heads of Medusa: one for each token."""
METHODS = (
    "none",
    "ngram",
    "suffix",
    "draft_model",
    "mtp",
    "eagle3",
    "medusa",
    "early_exit",
    "hybrid",
    "draft_model:tree",
    "mtp:tree",
)


PASSES = ("combine", "forward", "forward_logits", "logits_alone", "logits", "draft_chains", "draft_trees")
"""Methods of drafters' models that compute."""


class Stopwatch:
    """Thread time spent in some functions, inner calls counted once."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth += 1
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.thread_time() - start
                self._depth -= 1

        return timed

    def around_rounds(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``dw_rounds``: all of it but passes and verification counts as the host's."""
        counted = self.around(function)

        def timed(pool: Any, record: Any) -> Any:
            start = time.perf_counter()
            answer = counted(pool, record)
            whole = time.perf_counter() - start
            passes = (
                record.forward_ns + record.verify_ns + (record.draft_ns if record.drafter in (1, 2, 3) else 0)
            )
            self.spent -= max(whole - 1e-9 * passes, 0.0)
            return answer

        return timed


def make_engine(method: str, requests: int, beside: str | None = None, rounds: int | None = None) -> LLM:
    name, _, tree = method.partition(":")
    spec: dict[str, Any] = {"method": name}
    if tree:
        spec["speculative_token_tree"] = TREE
    elif name != "none":
        spec["num_speculative_tokens"] = min(K, MOST.get(name, K))
    return LLM(
        speculative_config=spec,
        speculation_control="static",
        max_num_seqs=requests,
        max_num_batched_tokens=requests * (2 if name == "none" else 2 + K) + PART
        if beside == "prompt"
        else 8192,
        max_model_len=1024,
        **({} if rounds is None else {"rounds_per_step": rounds}),  # versions before had no such option
    )


def go_one_by_one(llm: LLM) -> None:
    """Let no step of an engine be done in columns."""
    engine = llm._engine
    assert engine is not None
    executor: Any = engine.core.executor
    executor._ordinary = executor._drafting._placing = engine.core.scheduler._books = None


def watch(llm: LLM) -> Stopwatch:
    """Count model passes and the native verification of an engine."""
    watch = Stopwatch()
    engine = llm._engine
    assert engine is not None
    executor: Any = engine.core.executor
    for name in ("forward_logits", "logits_alone"):
        setattr(executor._model, name, watch.around(getattr(executor._model, name)))
    rules = getattr(executor, "_verifying", executor)._rules  # it has moved
    if rules is not None:
        rules._verify = watch.around(rules._verify)
    function = NativeLibrary.function

    def declared(self: NativeLibrary, name: str, *types: Any) -> Any:
        found: Any = function(self, name, *types)
        return watch.around(found) if name.startswith("dw_book_") else found

    NativeLibrary.function = declared  # type: ignore[method-assign]  # calls of drafts are declared by the first of them
    rounds = getattr(executor, "_rounds", None)
    if rounds is not None:
        rounds._call._run = watch.around_rounds(rounds._call._run)
    for proposer in executor._drafting._proposers.values():
        inner = getattr(proposer, "inner", proposer)  # of a hybrid
        for model in (getattr(inner, name, None) for name in ("_head", "_model", "_heads")):
            for name in PASSES:
                if hasattr(model, name):
                    setattr(model, name, watch.around(getattr(model, name)))
    return watch


@torch.inference_mode()  # as `LLM` steps
def measure(
    llm: LLM, spent: Stopwatch, requests: int, temperature: float, steps: int, beside: str | None = None
) -> list[float]:
    """Host seconds of each of ``steps`` steps with ``requests`` requests that decode, but who is ``beside`` them."""
    assert llm._engine is not None
    core, processor = llm._engine.core, llm._engine.processor
    rounds = core.scheduler._rounds._most if hasattr(core.scheduler, "_rounds") else 1
    tokens = (steps + WARM_STEPS) * (1 + K) * (2 if beside == "prompt" else 1) * rounds + 1
    tokens = min(tokens, 1000 - PROMPT)
    prompts = code_prompts(llm.get_tokenizer(), requests, PROMPT)
    for i, prompt in enumerate(prompts):
        reported = 1 if beside == "logprobs" and i >= requests - REPORTED else None
        params = SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=i, logprobs=reported
        )
        if beside == "prompt" and i == requests - 1:
            continue  # it comes when the others decode
        group = processor.group({"prompt_token_ids": list(prompt)}, params)
        for request in group.requests:
            core.add(request)
    deciding = requests - (beside == "prompt")
    execute, done = core.executor.execute, [1]

    def executed(plan: Any) -> Any:
        result = execute(plan)
        done[0] = getattr(result, "num_rounds", 1)
        return result

    core.executor.execute = executed
    while core.scheduler.num_running < deciding:
        core.step()
    for _ in range(WARM_STEPS):
        core.step()
    (long,) = code_prompts(llm.get_tokenizer(), 1, LONG) if beside == "prompt" else ([],)
    found: list[float] = []
    prompts_so_far = 0
    while len(found) < steps:
        if len(core.scheduler._requests) < requests:  # another prompt, of which the cache knows nothing
            prompts_so_far += 1
            params = SamplingParams(temperature=temperature, max_tokens=1)
            other = [*long[prompts_so_far:], *long[:prompts_so_far]]
            for request in processor.group({"prompt_token_ids": other}, params).requests:
                core.add(request)
        spent.spent = 0.0
        start = time.thread_time()
        updates = core.step()
        seconds = time.thread_time() - start
        if beside is None and any(update.finished for update in updates):
            break  # they have all that the model's length allows
        if len(updates) == requests and sum(update.num_new > 0 for update in updates) == deciding:
            found.append((seconds - spent.spent) / done[0])
        else:
            assert beside == "prompt" and len(updates) == requests  # its last part
    core.executor.execute = execute
    for rid in list(core.scheduler._requests):
        core.cancel(rid)
    core.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--beside", choices=["prompt", "logprobs"])
    args = parser.parse_args()
    rows = []
    for method in args.methods:
        llm = make_engine(method, max(args.requests), args.beside, args.rounds)
        if args.one_by_one:
            go_one_by_one(llm)
        spent = watch(llm)
        for temperature in args.temperatures:
            for requests in args.requests:
                found = measure(llm, spent, requests, temperature, args.steps, args.beside)
                microseconds = 1e6 * statistics.median(found)
                row = {
                    "method": method,
                    "temperature": temperature,
                    "requests": requests,
                    "step_us": round(microseconds, 1),
                    "quickest_us": round(1e6 * min(found), 1),
                    "request_us": round(microseconds / requests, 2),
                }
                rows.append(row)
                if not args.json:
                    print(
                        f"{method:>16}  T={temperature:<4} {requests:>4} requests  "
                        f"{microseconds:9.1f} us per round (quickest {1e6 * min(found):9.1f})  "
                        f"{microseconds / requests:7.2f} us per request",
                        flush=True,
                    )
        llm.close()
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
