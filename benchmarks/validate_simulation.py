"""Real runs of the embedded model against the simulation of the same requests.

    python benchmarks/validate_simulation.py profile.json [--rates 2 4 8] [--drafts 0 2 4] [--seconds 20] [--clock cpu]

The profile is measured first, unless the file is there already.

Each load is served by an engine in real time (requests come at random times; prompts of 128 tokens of held-out code, 64
out, greedy, fixed number of drafts), then simulated from the profile with the same arrivals, and compared: mean time
between tokens, output tokens per second, 95th percentile of the time to the first token. With ``--clock cpu`` both the
profile and the runs are timed by the processor time of one thread, and idle time is skipped: what else runs on the
machine then disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwise import SamplingParams, lifetime
from draftwise.bench.workloads import code_prompts
from draftwise.config import EngineConfig, resolve_engine_config
from draftwise.engine.builder import Engine, build_engine, tokenizer_of
from draftwise.plan.profile import Profile
from draftwise.plan.traces import Trace, poisson_trace
from draftwise.profile.run import Profiler, ProfileSettings, machine, model_name
from draftwise.simulate.cluster import Cluster
from draftwise.simulate.engine import EngineSettings, Policy
from draftwise.simulate.outcome import Outcome

PROMPT, OUTPUT, METHOD = 128, 64, "eagle3"


class Clock:
    """Time of the wall, or of this process's processor, to which waits are added."""

    def __init__(self, cpu: bool) -> None:
        self._cpu, self._waited = cpu, 0.0

    def __call__(self) -> float:
        return time.process_time() + self._waited if self._cpu else time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""
        if self._cpu:
            self._waited += max(seconds, 0.0)
        else:
            time.sleep(min(max(seconds, 0.0), 0.001))


def profiled(path: Path, config: EngineConfig, clock: Clock) -> Profile:
    """The file's, measured now if it is not there."""
    if path.exists():
        return Profile.load(path)
    profile = Profile(machine(config.device, config.num_threads), model_name(config))
    settings = ProfileSettings(path, [2, 4], [1, 2, 4, 8, 16], [64, 128, 256], [METHOD])
    profiler = Profiler(
        profile,
        settings,
        lambda engine: {"code": code_prompts(tokenizer_of(engine), 24, PROMPT)},
        engine_clock=clock,
    )
    profiler.measure(config, "auto", lambda total: lambda point: None)
    return profile


def real(
    engine: Engine, clock: Clock, prompts: list[tuple[int, ...]], trace: Trace, drafts: int
) -> dict[str, float]:
    """Serve the trace as time passes; means in seconds and tokens/s."""
    core = engine.core
    speculation = {"method": METHOD, "num_speculative_tokens": drafts} if drafts else {"method": "none"}
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False, speculation=speculation
    )
    core.scheduler.kv.reset_prefix_cache()
    arrivals = trace.times_np.tolist()
    requests = []
    with lifetime.computing(), torch.inference_mode():
        start = clock()
        while len(requests) < len(arrivals) or core.has_work:
            now = clock() - start
            while len(requests) < len(arrivals) and arrivals[len(requests)] <= now:
                prompt = {"prompt_token_ids": list(prompts[len(requests) % len(prompts)])}
                (request,) = engine.processor.group(prompt, params).requests
                requests.append(request)
                core.add(request)
            if core.has_work:
                core.step()
            else:
                clock.wait(arrivals[len(requests)] - now)
        seconds = clock() - start
    ttft = [r.first_token_time - start - t for r, t in zip(requests, arrivals, strict=True)]
    itl = [(r.finished_time - r.first_token_time) / (OUTPUT - 1) for r in requests]
    return summary(np.array(ttft), np.array(itl), len(requests) * OUTPUT / seconds)


def simulated(profile: Profile, trace: Trace, drafts: int, blocks: int) -> dict[str, float]:
    """The same from the profile."""
    policy = Policy(METHOD, drafts) if drafts else Policy()
    settings = EngineSettings(max_num_seqs=64, max_num_batched_tokens=2048, num_kv_blocks=blocks)
    found: Outcome = Cluster(trace, profile.times(), profile.acceptance(), policy, settings).run()
    return summary(found.ttft_np, found.itl_np, found.tokens / found.seconds)


def summary(ttft_np: Any, itl_np: Any, rate: float) -> dict[str, float]:
    """What is compared."""
    return {"itl": float(itl_np.mean()), "rate": rate, "ttft": float(np.percentile(ttft_np, 95))}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    clock = Clock(args.clock == "cpu")
    config = resolve_engine_config(
        speculative_config={"method": METHOD}, speculation_control="static", num_threads=1
    )
    profile = profiled(args.profile, config, clock)
    with lifetime.computing():
        engine = build_engine(config, clock)
    prompts = list(code_prompts(tokenizer_of(engine), 64, PROMPT, seed=7))
    warm = poisson_trace(20, 1, PROMPT, OUTPUT)
    real(engine, clock, prompts, warm, 2)
    rows = []
    for rate in args.rates:
        trace = poisson_trace(rate, args.seconds, PROMPT, OUTPUT, seed=round(100 * rate))
        for drafts in args.drafts:
            measured = real(engine, clock, prompts, trace, drafts)
            said = simulated(profile, trace, drafts, engine.core.scheduler.kv.num_blocks)
            rows.append({"rate": rate, "drafts": drafts, "real": measured, "simulated": said})
            if not args.json:
                cells = []
                for name, scale in (("itl", 1000), ("rate", 1), ("ttft", 1000)):
                    a, b = scale * measured[name], scale * said[name]
                    cells.append(f"{name} {a:7.2f} {b:7.2f} {b / a - 1:+5.0%}")
                print(f"{rate:4g}/s K={drafts}  " + "   ".join(cells), flush=True)
    engine.core.close()
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
