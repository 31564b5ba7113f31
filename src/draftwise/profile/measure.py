"""One engine that is made to run steps of a given size, and a clock."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from draftwise import lifetime
from draftwise.engine.builder import Engine
from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceCounts
from draftwise.plan.samples import REST_PARTS, PromptSample, RestSample, Setting, StepSample
from draftwise.profile.points import PromptPoint, StepPoint
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request, SpeculationCounts

_WARM = 3
"""Steps of a batch that are not counted: the first ones catch up on the prompts."""
_STEPS = 15
"""Steps of a batch that are counted, if they fit into `_SECONDS`; at least 3."""
_SECONDS = 0.6
_REPEATS = 3
_REST_PROMPT, _REST_OUTPUT = 32, 256
"""Tokens of the requests that are measured after a pause."""
_BEHIND = 3
"""Steps after a prompt that are looked at for whether they take longer ..."""
_LATER = 5
"""... than so many after them."""


class Measurer:
    """Puts requests into an engine and steps it. Leaves it empty after each call."""

    def __init__(self, engine: Engine, text: Sequence[int]) -> None:
        """``text``: token ids of real text, from which prompts are cut; not empty."""
        if not text:
            raise ConfigError("profile: there is no text to make prompts of")
        self.engine = engine
        self._text = list(text)
        self._from = 0

    def setting(self, weights: str) -> Setting:
        """Facts about the engine before anything is measured."""
        kv = self.engine.core.scheduler.kv
        tokens = kv.num_blocks * kv.block_size
        bytes_per_token = self.engine.kv_cache_bytes / max(tokens, 1)
        return Setting(
            weights, tokens, kv.block_size, bytes_per_token, self.engine.config.tensor_parallel_size
        )

    def _prompt(self, tokens: int) -> list[int]:
        """The next ``tokens`` tokens of the text, which begins anew at its end: no two prompts begin alike."""
        out: list[int] = []
        at = self._from
        while len(out) < tokens:
            out += self._text[at : at + tokens - len(out)]
            at = 0
        self._from = (self._from + 37) % len(self._text)
        return out

    def _add(self, prompt: Sequence[int], output: int, method: str, drafts: int) -> Request:
        speculation: dict[str, Any] = {"method": method}
        if method != "none":
            speculation["num_speculative_tokens"] = drafts
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, speculation=speculation
        )
        group = self.engine.processor.group({"prompt_token_ids": list(prompt)}, params)
        (request,) = group.requests
        self.engine.core.add(request)
        return request

    def _clear(self, requests: Sequence[Request]) -> None:
        core = self.engine.core
        for request in requests:
            core.cancel(request.rid)
        while core.has_work:
            core.step()
        core.scheduler.kv.reset_prefix_cache()

    def warm(self, methods: Sequence[str], drafts: int) -> None:
        """Run every method once: what is made at the first use is not measured."""
        for method in ("none", *methods):
            self.prompt(PromptPoint(32, method, 0 if method == "none" else drafts))

    def prompt(self, point: PromptPoint) -> PromptSample:
        """Prompts alone on the engine, and the few steps after each: what its drafter took longer than it does then
        went into reading the prompt."""
        core = self.engine.core
        seconds: list[float] = []
        readings: list[float] = []
        behind: list[float] = []
        output = 1 + (_BEHIND + _LATER) * (1 + point.drafts)
        output = max(min(output, self.engine.processor.max_model_len - point.tokens), 1)
        with lifetime.computing(), torch.inference_mode():
            for _ in range(_REPEATS):
                drafting = core.totals.draft_time
                start = core.clock()
                request = self._add(self._prompt(point.tokens), output, point.method, point.drafts)
                while request.first_token_time is None:
                    core.step()
                seconds.append(core.clock() - start)
                drafting = core.totals.draft_time - drafting
                wholes, draftings = self._steps_behind()
                self._clear([request])
                if draftings:
                    later = draftings[_BEHIND:] or draftings
                    if point.method != "none":
                        readings.append(drafting - statistics.median(later))
                    if len(wholes) > _BEHIND:
                        usual = statistics.median(wholes[_BEHIND:])
                        behind.append(sum(wholes[:_BEHIND]) - _BEHIND * usual)
                if sum(seconds) > 4 * _SECONDS:
                    break
        return PromptSample(point.method, point.tokens, tuple(seconds), tuple(readings), tuple(behind))

    def rest(self, pause: float) -> RestSample:
        """Requests after a pause, and the same requests without one, in turns. Plain decoding: what is cold is the
        machine, whatever it computes."""
        parts: list[list[float]] = [[] for _ in REST_PARTS]
        self._timed_parts(self._prompt(_REST_PROMPT))
        for _ in range(_REPEATS + 1):
            prompt = self._prompt(_REST_PROMPT)
            warm = self._timed_parts(prompt)
            time.sleep(pause)
            rested = self._timed_parts(prompt)
            for factors, a, b in zip(parts, rested, warm, strict=True):
                if a and b:
                    factors.append(a / b)
        # A slow model ends before the last parts: by then it is warm.
        return RestSample(pause, tuple(tuple(factors) or (1.0,) for factors in parts))

    def _timed_parts(self, prompt: Sequence[int]) -> list[float]:
        """Seconds per step of a request in each of `REST_PARTS`; 0: it had ended."""
        core = self.engine.core
        room = min(_REST_OUTPUT, self.engine.processor.max_model_len - len(prompt))
        parts: list[list[float]] = [[] for _ in REST_PARTS]
        with lifetime.computing(), torch.inference_mode():
            begin = start = core.clock()
            request = self._add(prompt, max(room, 1), "none", 0)
            while core.has_work:
                part = bisect_left(REST_PARTS, start - begin)
                if part == len(REST_PARTS):
                    break
                core.step()
                now = core.clock()
                parts[part].append(now - start)
                start = now
            self._clear([request])
        return [statistics.fmean(seconds) if seconds else 0.0 for seconds in parts]

    def _steps_behind(self) -> tuple[list[float], list[float]]:
        """(seconds, of these drafting) of the steps after a prompt's, as long as there are some."""
        core = self.engine.core
        wholes: list[float] = []
        draftings: list[float] = []
        while core.has_work and len(wholes) < _BEHIND + _LATER:
            step_time, draft_time = core.totals.step_time, core.totals.draft_time
            core.step()
            wholes.append(core.totals.step_time - step_time)
            draftings.append(core.totals.draft_time - draft_time)
        return wholes, draftings

    def step(self, point: StepPoint) -> StepSample | None:
        """Steps of a size; None if the requests ended, or lost their place, before there was anything to measure.

        What is accepted changes nothing but the context, by a few tokens: the times are those of the rows.
        """
        core = self.engine.core
        room = self.engine.processor.max_model_len - point.context - 1
        if room < 8:
            return None
        requests: list[Request] = []
        targets: list[float] = []
        draftings: list[float] = []
        widths: list[int] = []
        contexts = 0
        with lifetime.computing(), torch.inference_mode():
            try:
                for _ in range(point.requests):
                    requests.append(self._add(self._prompt(point.context), room, point.method, point.drafts))
                while any(r.first_token_time is None for r in requests):
                    core.step()
                for _ in range(_WARM):
                    core.step()
                while len(targets) < _STEPS and (
                    len(targets) < 3 or sum(targets) + sum(draftings) < _SECONDS
                ):
                    if core.scheduler.num_running < point.requests or core.scheduler.num_waiting:
                        break
                    context = sum(r.num_computed for r in requests)
                    step_time, draft_time = core.totals.step_time, core.totals.draft_time
                    drafted = self._counts().num_draft_tokens
                    core.step()
                    widths.append(point.requests + self._counts().num_draft_tokens - drafted)
                    contexts += context
                    draftings.append(core.totals.draft_time - draft_time)
                    targets.append(core.totals.step_time - step_time - draftings[-1])
            finally:
                self._clear(requests)
        if not targets:
            return None
        steps = len(targets)
        return StepSample(
            point.method,
            point.drafts,
            point.requests,
            point.context,
            round(sum(widths) / steps),
            contexts // steps,
            statistics.median(targets),
            statistics.median(draftings) if point.method != "none" else 0.0,
            steps,
            1,
            tuple(targets),
            tuple(draftings),
            tuple(widths),
        )

    def _counts(self) -> SpeculationCounts:
        return self.engine.core.speculation_counts()

    def accepted(
        self, method: str, drafts: int, prompts: Sequence[Sequence[int]], output: int
    ) -> list[tuple[int, AcceptanceCounts]]:
        """(tokens of the prompt, counts of the steps behind it) of each prompt, one at a time.

        The last steps do not count: there it is the end of the output that decides how much is drafted.
        """
        core = self.engine.core
        longest = self.engine.processor.max_model_len - output - 1
        found: list[tuple[int, AcceptanceCounts]] = []
        with lifetime.computing(), torch.inference_mode():
            for prompt in prompts:
                core.executor.forget()
                request = self._add(prompt[-longest:], output, method, drafts)
                counts = AcceptanceCounts()
                try:
                    before = self._counts()
                    while core.has_work:
                        tokens, left = request.num_computed, output - request.num_output
                        reading = request.first_token_time is None
                        core.step()
                        after = self._counts()
                        if not reading and left > drafts + 1:
                            size = min(after.num_draft_tokens - before.num_draft_tokens, drafts)
                            accepted = after.num_accepted_tokens - before.num_accepted_tokens
                            counts.add(size, min(accepted, size), tokens)
                        before = after
                finally:
                    self._clear([request])
                found.append((min(len(prompt), longest), counts))
        return found
