"""What drafters draft. A drafter that reads slots nobody filled loses no token: only its drafts are wrong. So they are
compared with those of a calm engine, and a drafter that is the target has to be right."""

from __future__ import annotations

from typing import Any

from draftwise import LLM, RequestOutput
from draftwise.engine.outputs import CompletionOutput
from draftwise.sched.request import StepTrace
from tests.fakes.fuzz.cases import Ask, Case
from tests.fakes.fuzz.drive import kernels
from tests.fakes.fuzz.world import MODEL_LEN, World

_OWN_TEXT = frozenset({"draft_model", "early_exit", "medusa"})
"""Drafts are a function of the text before them, whatever was cached."""
_HEADS = frozenset({"eagle", "eagle3", "mtp"})
"""The same, where no prefix hit leaves a gap behind which they know nothing."""
_SHAPING = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "logits_processors", "structured_outputs", "min_tokens", "min_p", "top_p", "top_k",
)  # fmt: skip
_NEUTRAL = {"repetition_penalty": 1.0, "top_p": 1.0}


def compared(case: Case, ask: Ask) -> bool:
    """Whether the drafts of a request are known in advance, bit for bit."""
    params = ask.params
    if case.kernels != "native" or params.temperature:
        return False
    if any(getattr(params, name) not in (_NEUTRAL.get(name, 0.0), (), None) for name in _SHAPING):
        return False
    heads = not case.options["enable_prefix_caching"] and case.options["speculation_control"] == "static"
    return ask.method in _OWN_TEXT or (ask.method in _HEADS and heads)


def always_right(case: Case, ask: Ask) -> bool:
    """Whether the drafter of a request is the target, bit for bit."""
    exact = case.family == "oracle" and ask.method == "draft_model" and not ask.adapter
    options = case.options
    return exact and options["kv_cache_dtype"] in ("auto", options["dtype"]) and "quantization" not in options


class Drafters:
    """Engines with the drafters of a case, which run one request at a time in a roomy cache and keep nothing of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: dict[str, LLM] = {}

    def check(self, case: Case, ask: Ask, output: RequestOutput) -> int:
        """Raises AssertionError for a draft that is not what the drafter drafts behind that text. Returns how many
        steps were compared."""
        if not compared(case, ask):
            return 0
        right = always_right(case, ask)
        calm = _drafts(output, self._alone(case, ask).outputs[0])
        compared_steps = 0
        for sample in output.outputs:
            known = len(output.prompt_token_ids)
            trace = sample.trace or ()
            for step in trace:
                if step.draft_tokens:
                    wanted = calm.get(known)
                    if wanted is not None:
                        compared_steps += 1
                        _same(step, wanted, known)
                    if right and step is not trace[-1]:
                        missed = f"the target itself drafted {step.draft_tokens} {step.draft_parents}"
                        assert len(step.accepted_nodes) == _first_path(step), (
                            f"{missed}: {step.accepted_nodes}"
                        )
                known += len(step.token_ids)
        return compared_steps

    def _alone(self, case: Case, ask: Ask) -> RequestOutput:
        options = case.options
        names = ("dtype", "kv_cache_dtype", "quantization", "speculative_config")
        own: dict[str, Any] = {name: options[name] for name in names if name in options}
        own["enable_lora"] = "enable_lora" in options
        key = repr(own)
        llm = self._made.get(key)
        if llm is None:
            self.close()
            with kernels("native"):
                llm = self._made[key] = LLM(
                    self._world.target,
                    device="cpu",
                    block_size=16,
                    num_kv_blocks=64,
                    max_num_seqs=1,
                    enable_prefix_caching=False,
                    speculation_control="static",
                    max_model_len=MODEL_LEN,
                    keep_trace=True,
                    **own,
                )
        params = ask.params.replace(n=1, output_kind="cumulative", logprobs=None, prompt_logprobs=None)
        adapter = self._world.adapters[ask.adapter]
        return llm.generate([{"prompt_token_ids": list(ask.prompt)}], params, lora_request=adapter)[0]

    def close(self) -> None:
        for llm in self._made.values():
            llm.close()
        self._made.clear()


def _drafts(output: RequestOutput, sample: CompletionOutput) -> dict[int, StepTrace]:
    """Drafts by the number of tokens known before them."""
    known = len(output.prompt_token_ids)
    found = {}
    for step in sample.trace or ():
        if step.draft_tokens:
            found[known] = step
        known += len(step.token_ids)
    return found


def _same(step: StepTrace, wanted: StepTrace, known: int) -> None:
    """As far as both go: budgets and limits cut at the end of the order of nodes."""
    n = min(len(step.draft_tokens), len(wanted.draft_tokens))
    found = step.draft_tokens[:n], step.draft_parents[:n]
    calm = wanted.draft_tokens[:n], wanted.draft_parents[:n]
    assert found == calm, f"drafts behind {known} tokens are {found}, alone {calm}"


def _first_path(step: StepTrace) -> int:
    """How deep the path of first children goes: what a greedy drafter thinks most likely."""
    at, depth = -1, 0
    while at in step.draft_parents:
        at = step.draft_parents.index(at)
        depth += 1
    return depth
