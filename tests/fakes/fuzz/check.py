"""What an engine's answers have to be: those of each request alone, decoded plainly on the same kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftwise import LLM, RequestOutput, SamplingParams
from draftwise.engine.outputs import CompletionOutput, LogprobsDict
from tests.fakes.fuzz.cases import EXACT_RULES, Ask, Case
from tests.fakes.fuzz.drafts import Drafters
from tests.fakes.fuzz.drive import Answer, Run, kernels, run_case
from tests.fakes.fuzz.world import END, MODEL_LEN, World

ROUNDING = 1e-4
"""On plain torch, by how much logits may differ with the number of rows, in float32 and for logits under 100."""


def check_case(case: Case, references: References) -> Run:
    """Run a case and compare. Raises AssertionError."""
    run = run_case(case, references.world)
    check_run(case, run, references)
    return run


def check_run(case: Case, run: Run, references: References) -> None:
    """Compare what a case gave. Raises AssertionError."""
    assert run.same_bits == (case.kernels == "native")
    for i, answer in enumerate(run.answers):
        try:
            _check_answer(case, answer, references, run.same_bits)
        except AssertionError as error:
            raise AssertionError(f"request {i}: {error}\n{answer.ask}") from error
    if case.drive == "steps":
        _check_totals(run)


class References:
    """Engines that decode plainly, one for each kind of arithmetic; requests go through them one by one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.drafters = Drafters(world)
        self._made: dict[tuple[object, ...], LLM] = {}

    def engine(self, case: Case) -> LLM:
        options = case.options
        names = ("dtype", "kv_cache_dtype", "quantization")
        key = (case.kernels, "enable_lora" in options, *(options.get(name) for name in names))
        llm = self._made.get(key)
        if llm is None:
            with kernels(case.kernels):
                llm = self._made[key] = LLM(
                    self.world.target,
                    device="cpu",
                    block_size=16,
                    num_kv_blocks=64,
                    max_num_seqs=1,
                    enable_prefix_caching=False,
                    speculation_control="static",
                    enable_lora="enable_lora" in options,
                    **{name: options[name] for name in names if name in options},
                )
        return llm

    def plain(self, case: Case, answer: Answer, **changes: Any) -> RequestOutput:
        """The same request alone, without speculation."""
        ask = answer.ask
        params = ask.params.replace(
            seed=answer.seed,
            max_tokens=limit(ask),
            output_kind="cumulative",
            speculation={"method": "none", "rule": ask.rule},
            **changes,
        )
        return self.generate(case, ask, ask.prompt, params)

    def generate(
        self, case: Case, ask: Ask, token_ids: Sequence[int], params: SamplingParams
    ) -> RequestOutput:
        """Another prompt, with the adapter of a request."""
        adapter = self.world.adapters[ask.adapter]
        return self.engine(case).generate(
            [{"prompt_token_ids": list(token_ids)}], params, lora_request=adapter
        )[0]

    def close(self) -> None:
        self.drafters.close()
        for llm in self._made.values():
            assert llm.stats().num_used_blocks == 0
            llm.close()


def limit(ask: Ask) -> int:
    """Most output tokens."""
    room = MODEL_LEN - len(ask.prompt)
    return room if ask.params.max_tokens is None else min(room, ask.params.max_tokens)


# ------------------------------------------------------------------------------------------- one request


def _check_answer(case: Case, answer: Answer, references: References, same_bits: bool) -> None:
    ask, output = answer.ask, answer.output
    if output is None:
        assert answer.dead or ask.cancel or case.close_early, "no output"
        return
    gone = answer.dead or ask.cancel is not None
    assert output.prompt_token_ids == ask.prompt
    assert [sample.index for sample in output.outputs] == list(range(ask.params.n))
    if not gone:
        assert output.finished
    for sample in output.outputs:
        _check_structure(ask, sample, gone)
    if answer.pieces is not None:
        ids, texts = answer.pieces
        for sample, read, text in zip(output.outputs, ids, texts, strict=True):
            assert sample.token_ids[: len(read)] == read, "pieces are not the output"
            assert sample.text.startswith(text), "pieces of text are not the text"
            if not gone:
                assert (len(read), text) == (len(sample.token_ids), sample.text)
    _check_counts(ask, output)
    references.drafters.check(case, ask, output)
    if ask.rule in EXACT_RULES:
        wanted = references.plain(case, answer)
        for sample, other in zip(output.outputs, wanted.outputs, strict=True):
            if same_bits:
                _check_same(sample, other, ask.params.stop, gone)
            else:
                _check_close(case, answer, sample, other, references)
        if output.prompt_logprobs is not None and wanted.prompt_logprobs is not None:
            _check_logprobs(output.prompt_logprobs, wanted.prompt_logprobs, same_bits)
    elif same_bits:
        _check_read_again(case, answer, output, references)


def _check_same(sample: CompletionOutput, other: CompletionOutput, stops: Sequence[str], gone: bool) -> None:
    """``other``: what plain decoding says; ``stops``: strings."""
    n = len(sample.token_ids)
    assert sample.token_ids == other.token_ids[:n], f"{sample.token_ids}, plainly {other.token_ids}"
    if sample.logprobs is not None:
        assert other.logprobs is not None
        _check_logprobs(sample.logprobs, other.logprobs[:n], True)
    if sample.finish_reason in (None, "abort") and gone:
        # Where nothing more comes, what might have become a stop string is text.
        held = max(map(len, stops), default=1) - 1
        whole = sample.text.rstrip("�")
        whole = whole[: max(len(whole) - held, 0)]
        assert other.text.startswith(whole), f"{sample.text!r}, plainly {other.text!r}"
        return
    if sample.finish_reason == "error":
        assert other.finish_reason == "error", f"failed: {sample.error}"
    found = (sample.finish_reason, sample.stop_reason, sample.text, n)
    assert found == (other.finish_reason, other.stop_reason, other.text, len(other.token_ids)), (
        f"{found}, plainly {(other.finish_reason, other.stop_reason, other.text, len(other.token_ids))}"
    )
    assert sample.cumulative_logprob == other.cumulative_logprob


def _check_close(
    case: Case, answer: Answer, sample: CompletionOutput, other: CompletionOutput, references: References
) -> None:
    """Equal, unless two tokens tie within rounding where they part."""
    pairs = zip(sample.token_ids, other.token_ids, strict=False)
    parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if parted is None:
        if sample.finish_reason not in (None, "abort", "error"):
            assert len(sample.token_ids) == len(other.token_ids)
        if sample.logprobs is not None:
            _check_logprobs(sample.logprobs, (other.logprobs or ())[: len(sample.logprobs)], False)
        return
    for seed in range(30):
        noisy = (*answer.ask.params.logits_processors, _Noise(seed))
        again = references.plain(case, answer, logits_processors=noisy).outputs[sample.index]
        if again.token_ids[: parted + 1] == sample.token_ids[: parted + 1]:
            return
    raise AssertionError(f"{sample.token_ids}, plainly {other.token_ids}, and no tie at token {parted}")


class _Noise:
    """Moves logits by as much as rounding may."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self._seed + len(token_ids))
        return logits + (torch.rand(logits.shape, generator=generator) - 0.5) * 2 * ROUNDING


def _check_read_again(case: Case, answer: Answer, output: RequestOutput, references: References) -> None:
    """Sampled tokens are nobody's to foretell, but what the target thought of them is: it reads prompt and output as
    one prompt."""
    ask = answer.ask
    for sample in output.outputs:
        if sample.logprobs is None or not sample.token_ids:
            continue
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=ask.params.logprobs)
        whole = (*ask.prompt, *sample.token_ids)
        read = references.generate(case, ask, whole, params).prompt_logprobs
        assert read is not None
        _check_logprobs(sample.logprobs, read[len(ask.prompt) :], True)


def _check_logprobs(
    found: Sequence[LogprobsDict | None], wanted: Sequence[LogprobsDict | None], same_bits: bool
) -> None:
    assert len(found) == len(wanted), f"{len(found)} logprobs, plainly {len(wanted)}"
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one is None or other is None:
            assert one is other
        elif same_bits:
            assert list(one.items()) == list(other.items()), f"logprobs {i}: {one}, plainly {other}"
        else:
            for token in one.keys() & other.keys():
                assert abs(one[token].logprob - other[token].logprob) < 100 * ROUNDING, f"logprobs {i}"


def _check_structure(ask: Ask, sample: CompletionOutput, gone: bool) -> None:
    """What holds of every output, sampled or not."""
    params, ids, reason = ask.params, sample.token_ids, sample.finish_reason
    most = limit(ask)
    assert len(ids) <= most, f"{len(ids)} tokens, allowed are {most}"
    assert (sample.logprobs is not None) == (params.logprobs is not None)
    if sample.logprobs is not None:
        assert len(sample.logprobs) == len(ids)
        assert all(token in entry for token, entry in zip(ids, sample.logprobs, strict=True))
    stops = set(params.stop_token_ids)
    if not params.ignore_eos or params.structured_outputs is not None:
        stops.add(END)
    early = ids[:-1] if reason == "stop" else ids
    assert not any(t in stops for t in early[max(params.min_tokens - 1, 0) :]), f"{ids} goes on behind a stop"
    if params.allowed_token_ids is not None and params.structured_outputs is None:
        assert set(ids) <= {*params.allowed_token_ids}
    if reason == "length":
        assert len(ids) == most, f"ends by length after {len(ids)} of {most} tokens"
    elif reason == "stop":
        assert len(ids) >= min(params.min_tokens, 1)
        if isinstance(sample.stop_reason, str):
            assert sample.stop_reason in params.stop
            if params.include_stop_str_in_output:
                assert sample.text.endswith(sample.stop_reason)
            elif not params.min_tokens:  # else one that came too early may stand there
                assert sample.stop_reason not in sample.text
        else:
            assert ids[-1] in stops and sample.stop_reason in (None, ids[-1])
    elif reason == "error":
        assert sample.error
    else:
        assert gone and reason in (None, "abort"), f"finish_reason {reason}"


def _check_counts(ask: Ask, output: RequestOutput) -> None:
    """Counters, against the steps that the request remembers."""
    counts = output.metrics.speculation
    assert sum(counts.num_accepted_tokens_per_pos) == counts.num_accepted_tokens <= counts.num_draft_tokens
    steps = drafts = drafted = accepted = 0
    for sample in output.outputs:
        if sample.trace is None:
            return
        told: list[int] = []
        for step in sample.trace:
            steps += 1
            drafts += bool(step.draft_tokens)
            drafted += len(step.draft_tokens)
            path = [step.draft_tokens[node] for node in step.accepted_nodes]
            taken = min(len(path), len(step.token_ids))
            accepted += taken
            assert list(step.token_ids[:taken]) == path[:taken]
            assert step.method == "none" or step.draft_tokens
            told += step.token_ids
        assert tuple(told) == sample.token_ids, "the trace tells another story"
    found = (counts.num_steps, counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens)
    assert found == (steps, drafts, drafted, accepted)
    if ask.method == "none":
        assert not drafted


# ----------------------------------------------------------------------------------------------- in sum


def _check_totals(run: Run) -> None:
    stats = run.stats
    outputs = [answer.output for answer in run.answers if answer.output is not None]
    samples = [sample for output in outputs for sample in output.outputs]
    assert stats.num_requests_finished == len(samples)
    assert stats.num_generation_tokens == sum(len(sample.token_ids) for sample in samples)
    assert sum(stats.finish_reasons.values()) == len(samples)
    assert stats.num_prompt_tokens == sum(len(o.prompt_token_ids) * len(o.outputs) for o in outputs)
    assert 0 <= stats.prefix_cache_hits <= stats.prefix_cache_queries
    assert stats.num_preemptions == sum(output.metrics.num_preemptions for output in outputs)
    told = [output.metrics.speculation for output in outputs]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(stats.speculation, name) == sum(getattr(counts, name) for counts in told), name
