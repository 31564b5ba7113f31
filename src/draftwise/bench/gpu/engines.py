"""Parts: whole engines with forced acceptance, Transformers as baseline, and the memory plan kept."""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch

from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.controller import Controller, StaticController
from draftwise.adapt.performance import PerformanceModel
from draftwise.bench.gpu.acceptance import ForcedAcceptance
from draftwise.bench.gpu.models import llama_config, random_head, random_target
from draftwise.bench.gpu.report import PartReport
from draftwise.bench.gpu.setting import BLOCK, Setting
from draftwise.bench.gpu.steps import DRAFTS
from draftwise.config.synthetic import rates_of_length
from draftwise.engine.core import EngineCore
from draftwise.engine.gpu_memory import plan_gpu
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.setup import GraphSetup
from draftwise.graphs.timing import pass_times
from draftwise.kv.manager import KVManager
from draftwise.kv.storage import KVStorage
from draftwise.propose.heads.eagle import Eagle3Proposer
from draftwise.runner.executor import Executor
from draftwise.runner.local import LocalExecutor
from draftwise.runner.threaded import ThreadedExecutor
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.types import Speculation
from draftwise.verify.base import BatchRules
from draftwise.verify.rates import SyntheticAcceptance

_WANTED = {1: 2.3, 16: 1.7, 64: 1.4, 256: 0.0}
"""Speed over plain decoding at an acceptance of `_LENGTH` tokens per step, by batch size: 256 is more than pays."""
_LENGTH = 3.0
PLAIN = Speculation("none", 0, "greedy")
SPECULATIVE = Speculation("eagle3", DRAFTS, "greedy")


class BenchEngine:
    """Target and head in one process, without a tokenizer; one set of captured graphs for all controllers."""

    def __init__(self, setting: Setting, max_num_seqs: int, num_blocks: int) -> None:
        self.setting = setting
        self.num_blocks = num_blocks
        target = random_target(setting, setting.ops())
        head = random_head(setting, target)
        setup = self.setup = GraphSetup(
            setting.graphs(), BLOCK, max_num_seqs, setting.size.prefill, setting.size.max_len
        )
        self.model = setup.target(target, (1, 1 + DRAFTS))
        self.proposer = Eagle3Proposer(
            setup.head(head, DRAFTS),
            vocab_size=setting.size.vocab,
            block_size=BLOCK,
            max_model_len=setting.size.max_len,
            max_num_seqs=max_num_seqs,
        )
        self.max_num_seqs = max_num_seqs
        self.rid = 0

    def allocate(self) -> None:
        """Storage for the blocks, and everything captured."""
        blocks, model = self.num_blocks, self.model
        self.storage = KVStorage(
            model.kv_layout(), blocks, BLOCK, model.dtype, self.setting.device, spare=model.pads
        )
        self.proposer.allocate(blocks)
        self.proposer.use_target_storage(self.storage)
        model.prepare(self.storage, self.proposer.capture_layers)

    def core(self, *, adaptive: bool = False, ahead: bool = False) -> EngineCore:
        """An engine over them, with an empty cache."""
        rates = SyntheticAcceptance(rates_of_length(_LENGTH, DRAFTS))
        executor: Executor = LocalExecutor(
            self.model,
            self.storage,
            {"eagle3": self.proposer},
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            device=self.setting.device,
            rules=ForcedAcceptance(_rules(self.setting), rates),
            seated=ahead,
        )
        if ahead:
            executor = ThreadedExecutor(executor)
        controller: Controller = StaticController()
        if adaptive:  # as `engine.builder` makes it: the head reads what the target computes
            model, seated = PerformanceModel(), False
            if ahead and isinstance(self.model, GraphedDecoder):
                model.teach_passes(pass_times(self.model, self.storage, self.num_blocks))
                seated = True
            controller = AdaptiveController(observing={"eagle3"}, ahead=ahead, seated=seated, model=model)
        rows = max(self.setting.size.prefill, self.max_num_seqs * (1 + DRAFTS))
        scheduler = Scheduler(
            SchedulerConfig(self.max_num_seqs, rows),
            KVManager(self.num_blocks, BLOCK, True),
            controller,
            time.perf_counter,
        )
        return EngineCore(scheduler, executor, time.perf_counter, ahead=ahead)

    def decode(
        self,
        core: EngineCore,
        requests: int,
        prompt: int,
        speculation: Speculation,
        steps: int,
        warm: int = 4,
        around: AbstractContextManager[object] | None = None,
    ) -> tuple[float, float, float]:
        """Tokens per second, seconds per step (median) and tokens per step and request, over ``steps`` steps in which
        all requests decode; these are done inside ``around``."""
        rng = np.random.default_rng(0)
        size = self.setting.size
        for _ in range(requests):
            self.rid += 1
            core.add(
                Request(
                    self.rid,
                    rng.integers(0, size.vocab, prompt).astype(np.int32),
                    SamplingParams(temperature=0.0, max_tokens=size.max_len - prompt, ignore_eos=True),
                    speculation,
                    max_total=size.max_len,
                    seed=self.rid,
                    arrival_time=0.0,
                )
            )
        first, started = self.rid - requests + 1, set[int]()
        while len(started) < requests:
            started |= {update.request.rid for update in core.step() if update.num_new}
        for _ in range(warm):
            core.step()
        self.setting.synchronize()
        tokens, times = 0, []
        begun = last = time.perf_counter()
        with around or nullcontext():
            for _ in range(steps):
                tokens += sum(update.num_new for update in core.step())
                now = time.perf_counter()
                times.append(now - last)
                last = now
        self.setting.synchronize()
        seconds = time.perf_counter() - begun
        for rid in range(first, self.rid + 1):
            core.cancel(rid)
        for _ in range(2):  # the second time, the executor learns that they are gone
            core.step()
            while core.has_work:
                core.step()
        return tokens / seconds, sorted(times)[len(times) // 2], tokens / steps / requests


def _rules(setting: Setting) -> BatchRules | None:
    if not setting.cuda:
        return None
    from draftwise.verify.triton import TritonRules

    return TritonRules()


def blocks_for(setting: Setting) -> int:
    """Blocks that the largest of the batches needs, with what its requests generate."""
    more = int(_LENGTH * 4 * setting.size.steps) + 64
    most = setting.size.max_len
    return max(r * -(-min(prompt + more, most) // BLOCK) for r, prompt in setting.size.batches) + 64


def measure_engines(setting: Setting, report: PartReport) -> None:
    """Plain decoding, drafts with an acceptance of three tokens per step, and adaptive control, at every batch size:
    steps that stay on the device, as engines have them on a GPU by default, and those that wait."""
    size = setting.size
    engine = BenchEngine(setting, max(requests for requests, _ in size.batches), blocks_for(setting))
    begun = time.perf_counter()
    engine.allocate()
    setting.synchronize()
    report.add("capturing everything", time.perf_counter() - begun, "s")
    for requests, prompt in size.batches:
        _measure_batch(engine, report, requests, prompt)
    if setting.cuda:
        _count_waits(engine, report)


def _measure_batch(engine: BenchEngine, report: PartReport, requests: int, prompt: int) -> None:
    name, steps = f"batch {requests}, prompts of {prompt}", engine.setting.size.steps
    wanted = _WANTED.get(requests, 0.0)
    waiting = engine.core()
    slow, step, _ = engine.decode(waiting, requests, prompt, PLAIN, steps)
    report.add(f"{name}: plain, waiting", slow, "tokens/s", note=f"{step * 1e3:.2f} ms a step")
    rate, wide, length = engine.decode(waiting, requests, prompt, SPECULATIVE, steps)
    note = f"{rate:.0f} tokens/s, {wide * 1e3:.2f} ms a step, {length:.2f} tokens per step"
    report.add(f"{name}: {DRAFTS} drafts, waiting / plain, waiting", rate / slow, "x", note=note)
    ahead = engine.core(ahead=True)
    plain, step, _ = engine.decode(ahead, requests, prompt, PLAIN, steps)
    report.add(f"{name}: plain", plain, "tokens/s", note=f"{step * 1e3:.2f} ms a step")
    rate, seated, length = engine.decode(ahead, requests, prompt, SPECULATIVE, steps)
    _say_who_stays(report, name, ahead)
    ahead.executor.close()
    note = f"{rate:.0f} tokens/s, {seated * 1e3:.2f} ms a step, {length:.2f} tokens per step"
    report.at_least(f"{name}: {DRAFTS} drafts / plain", rate / plain, wanted, "x", note)
    learning = engine.core(adaptive=True, ahead=True)
    rate, step, length = engine.decode(learning, requests, prompt, SPECULATIVE, steps, warm=3 * steps)
    learning.executor.close()
    note = f"{rate:.0f} tokens/s, {step * 1e3:.2f} ms a step, {length:.2f} tokens per step"
    # the controller's promise: at most 2 % lost
    report.at_least(f"{name}: drafts when they pay / plain", rate / plain, 0.98, "x", note)
    if requests <= 16:
        _compare_gap(engine, report, name, requests, prompt, wide, seated)


def _say_who_stays(report: PartReport, name: str, core: EngineCore) -> None:
    """Whether what was measured ahead are steps that stay on the device."""
    assert isinstance(core.executor, ThreadedExecutor) and isinstance(core.executor.inner, LocalExecutor)
    seats = core.executor.inner.seats
    report.add(f"{name}: steps on the device", 0.0 if seats is None else float(seats.num_steps))


def _compare_gap(
    engine: BenchEngine,
    report: PartReport,
    name: str,
    requests: int,
    prompt: int,
    waiting: float,
    seated: float,
) -> None:
    """Speculative steps, one that waits and one that stays on the device, against what their two graphs take alone."""
    from draftwise.graphs.head import GraphedHead
    from draftwise.models.inputs import build_step_input

    setting, model, passes = engine.setting, engine.model, engine.proposer._passes
    head = passes.head
    if not isinstance(model, GraphedDecoder) or not isinstance(head, GraphedHead):
        return
    rows = setting.rows(requests, 1 + DRAFTS, prompt)
    with torch.inference_mode():
        target = model.replay_of(build_step_input(rows, BLOCK, model.inputs_on), engine.storage)
        few = [row._replace(tokens=row.tokens[:3]) for row in rows]
        features = torch.zeros(requests * 3, head.feature_size, dtype=head.dtype, device=setting.device)
        batch = build_step_input(few, BLOCK, head.inputs_on, position_offset=-1)
        loop = head.loop_of(batch, features, passes.kv, DRAFTS)
        if target is None or loop is None:
            return
        alone = setting.time(target) + setting.time(loop)
    note = f"graphs {alone * 1e3:.2f} ms"
    report.add(f"{name}: speculative step that waits / its graphs", waiting / alone, "x", note=note)
    report.at_most(f"{name}: speculative step on the device / its graphs", seated / alone, 1.05, "x", note)


class _Waits(AbstractContextManager["_Waits"]):
    """Counts how often the host waits for the device, as torch's sync debug mode does."""

    def __init__(self) -> None:
        self.count = 0
        self._catching = warnings.catch_warnings(record=True)

    def __enter__(self) -> Self:
        self._caught = self._catching.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        caught = self._caught or []
        self.count = sum("synchroniz" in str(w.message).lower() for w in caught)
        self._catching.__exit__(None, None, None)


def _count_waits(engine: BenchEngine, report: PartReport) -> None:
    """How often ten speculative steps wait for the device."""
    prompt = min(64, engine.setting.size.context // 2)
    for ahead in (False, True):
        core, waits = engine.core(ahead=ahead), _Waits()
        engine.decode(core, 1, prompt, SPECULATIVE, 10, around=waits)
        if ahead:
            core.executor.close()
            report.at_most("waits for the device in 10 speculative steps on it", float(waits.count), 0.0)
        else:
            note = "one result of verification, one of drafting"
            report.add("waits for the device in 10 speculative steps", float(waits.count), note=note)


def measure_memory(setting: Setting, report: PartReport) -> None:
    """Plan 0.9 of the device, build everything, run the largest steps, and look."""
    if not setting.cuda:
        report.skipped = "needs a GPU"
        return
    size, device = setting.size, setting.device
    engine = BenchEngine(setting, 64, 1)
    block = KVStorage.bytes_per_block(engine.model.kv_layout(), BLOCK, engine.model.dtype)
    plan = plan_gpu(
        engine.model,
        utilization=0.9,
        rows=size.prefill,
        logit_rows=64 * (1 + DRAFTS),
        block_size=BLOCK,
        block_bytes=block + engine.proposer.memory_per_block(),
        fixed=engine.proposer.memory_fixed(),
        drafter_bytes=engine.proposer.memory_static(),
        num_graphs=engine.setup.count,
        most_blocks=1 << 30,
    )
    engine.num_blocks = plan.num_blocks
    engine.allocate()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    report.add("planned", plan.planned / 2**30, "GiB", note=f"{plan.num_blocks} blocks")
    report.at_most("used once everything is captured", (total - free) / 2**30, plan.limit / 2**30, "GiB")
    engine.decode(engine.core(), 64, min(512, size.context // 2), SPECULATIVE, 10)
    free, total = torch.cuda.mem_get_info(device)
    report.at_most("used after the largest steps", (total - free) / 2**30, plan.limit / 2**30, "GiB")
    report.add("of that, torch's own", torch.cuda.max_memory_reserved(device) / 2**30, "GiB")


def measure_transformers(setting: Setting, report: PartReport) -> None:
    """Transformers' own generation with the same shape."""
    try:
        import transformers
    except ImportError as error:
        report.skipped = f"Transformers is not installed ({error})"
        return
    size = setting.size
    given: dict[str, Any] = llama_config(size)
    config = transformers.LlamaConfig(
        **{k: v for k, v in given.items() if k not in ("architectures", "model_type")}
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with torch.device(setting.device):
            model: Any = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval()
    report.add("version", transformers.__version__)
    new = 2 * size.steps
    for requests, prompt in size.batches:
        if requests > 64:
            continue
        ids = torch.randint(0, size.vocab, (requests, prompt), device=setting.device)
        options = {
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        seconds: dict[int, float] = {}
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=2, **options)
            for count in (2, 2 + new):
                setting.synchronize()
                begun = time.perf_counter()
                model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
                setting.synchronize()
                seconds[count] = time.perf_counter() - begun
        rate = requests * new / (seconds[2 + new] - seconds[2])
        report.add(f"batch {requests}, prompts of {prompt}: decoding", rate, "tokens/s")
