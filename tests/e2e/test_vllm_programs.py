"""Programs in the style of vLLM's examples run with another import: ``from draftwise import *``.

The bodies are written for this test, after the kinds of examples that vLLM has: each uses the names, keywords and
shapes that such a program uses. ``MODEL`` stands where they name a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, AsyncLLM, EngineArgs, LLMEngine, RequestError, SamplingParams
from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError, EngineDeadError
from tests.fakes.lora import save_adapter
from tests.fakes.tiny_chat import make_tiny_chat

MODEL = str(embedded_path("target"))

BASIC = """
prompts = ["def main(", "import os", "class Node:"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model=MODEL)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert [o.prompt for o in outputs] == prompts
assert all(len(o.outputs[0].token_ids) <= 16 for o in outputs)
"""

GENERATE = """
parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(model=MODEL, max_model_len=256)
group = parser.add_argument_group("Sampling parameters")
group.add_argument("--max-tokens", type=int)
group.add_argument("--top-k", type=int)
args = vars(parser.parse_args(["--max_tokens", "8", "--top-k=5", "--max-num-seqs", "4", "--enforce-eager"]))
max_tokens, top_k = args.pop("max_tokens"), args.pop("top_k")
llm = LLM(**args)
sampling_params = llm.get_default_sampling_params()
if max_tokens is not None:
    sampling_params.max_tokens = max_tokens
if top_k is not None:
    sampling_params.top_k = top_k
outputs = llm.generate(["def a(", [5, 6, 7]], sampling_params)
assert all(len(o.outputs[0].token_ids) == 8 for o in outputs)
assert llm.config.max_num_seqs == 4 and llm.max_model_len == 256
assert list(outputs[1].prompt_token_ids) == [5, 6, 7]
"""

CHAT = """
llm = LLM(model=MODEL, tokenizer_mode="auto", load_format="auto", generation_config="auto", hf_overrides={},
          max_logprobs=20, scheduling_policy="fcfs", cpu_offload_gb=0, limit_mm_per_prompt={"image": 1}, swap_space=4)
params = SamplingParams(max_tokens=6, temperature=0, extra_args=None)
conversation = [
    {"role": "system", "content": "# a module"},
    {"role": "user", "content": [{"type": "text", "text": "def add(a, b):"}]},
]
outputs = llm.chat(conversation, params, use_tqdm=False, lora_request=None,
                   chat_template_kwargs={"enable_thinking": False})
assert outputs[0].prompt == "# a module\\ndef add(a, b):"
both = llm.chat([conversation, conversation], sampling_params=params, add_generation_prompt=False,
                continue_final_message=True)
assert [o.outputs[0].text for o in both] == [outputs[0].outputs[0].text] * 2
"""

PREFIX = """
prefix = "import os\\nimport sys\\n\\nclass Table:\\n    def __init__(self, rows):\\n        self.rows = rows\\n\\n" * 3
prompts = [prefix + "    def add(self", prefix + "    def remove(self", prefix + "    def __len__(self"]
params = SamplingParams(temperature=0.0, max_tokens=6)
regular = LLM(model=MODEL, gpu_memory_utilization=0.4, enable_prefix_caching=False)
expected = [o.outputs[0].text for o in regular.generate(prompts, params)]
regular.close()
cached = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4)
cached.generate(prompts[0], params)
outputs = cached.generate(prompts, params)
assert [o.outputs[0].text for o in outputs] == expected
assert all(o.num_cached_tokens > 0 for o in outputs)
assert cached.reset_prefix_cache()
"""

STRUCTURED = """
llm = LLM(model=MODEL, max_model_len=128)
choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]), max_tokens=12)
assert llm.generate("verdict = ", sampling_params=choice)[0].outputs[0].text in ("Positive", "Negative")
regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex=r"[a-z]{2,6}\\d"), max_tokens=12)
import re
assert re.fullmatch(r"[a-z]{2,6}[0-9]", llm.generate("name = ", regex)[0].outputs[0].text)
schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
          "additionalProperties": False}
params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=40, temperature=0)
assert set(json.loads(llm.generate("value = ", params)[0].outputs[0].text)) == {"n"}
"""

METRICS = """
llm = LLM(model=MODEL, disable_log_stats=False)
llm.generate(["def a(", "def b("], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8))
seen = {}
for metric in llm.get_metrics():
    if isinstance(metric, (Gauge, Counter)):
        seen[metric.name] = metric.value
    elif isinstance(metric, Vector):
        seen[metric.name] = metric.values
    elif isinstance(metric, Histogram):
        seen[metric.name] = metric.buckets
    else:
        raise AssertionError(metric)
assert seen["vllm:generation_tokens"] == llm.stats().num_generation_tokens > 0
assert seen["vllm:num_requests_running"] == 0
"""

SPECULATION = """
llm = LLM(
    model=MODEL, trust_remote_code=True, tensor_parallel_size=1, enable_chunked_prefill=True, enforce_eager=False,
    gpu_memory_utilization=0.9, speculative_config={"method": "ngram", "num_speculative_tokens": 3,
                                                    "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    disable_log_stats=False, max_model_len=512, limit_mm_per_prompt={"image": 5}, disable_chunked_mm_input=True,
    max_num_seqs=8, speculation_control="static",
)
ids = llm.get_tokenizer().encode("x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,")
params = SamplingParams(temperature=0, max_tokens=32)
outputs = llm.generate([TokensPrompt(prompt_token_ids=ids)], sampling_params=params)
total = sum(len(output.outputs[0].token_ids) for output in outputs)
num_drafts = num_draft_tokens = num_accepted_tokens = 0
acceptance_counts = [0] * 3
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        num_draft_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        num_accepted_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for pos in range(len(metric.values)):
            acceptance_counts[pos] += metric.values[pos]
assert total > 0 and num_drafts > 0 and num_draft_tokens >= num_accepted_tokens == sum(acceptance_counts)
"""

STREAMING = """
async def stream(engine, prompt, request_id):
    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            pieces.append(completion.text)
        if output.finished:
            break
    return "".join(pieces)

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, enforce_eager=True))
    try:
        return [await stream(engine, prompt, f"stream-{i}") for i, prompt in enumerate(["def a(", "def b("])]
    finally:
        engine.shutdown()

texts = asyncio.run(main())
assert len(texts) == 2 and all(texts)
"""

PROGRAMS = {
    "basic": BASIC, "generate": GENERATE, "chat": CHAT, "prefix_caching": PREFIX, "structured_outputs": STRUCTURED,
    "metrics": METRICS, "spec_decode": SPECULATION, "async_streaming": STREAMING,
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs(name: str) -> None:
    space: dict[str, Any] = {"MODEL": MODEL}
    program = f"import asyncio, json\nfrom draftwise import *\n{PROGRAMS[name]}"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(program, f"<{name}>", "exec"), space)
    finally:
        for value in list(space.values()):
            if isinstance(value, LLM):
                value.close()


MULTILORA = """
def create_test_prompts(lora_path):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [("hello", params, None), ("hello", params, LoRARequest("sql-lora", 1, lora_path))]

def process_requests(engine, test_prompts):
    request_id, found = 0, {}
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        for request_output in engine.step():
            if request_output.finished:
                found[request_output.request_id] = request_output.outputs[0].text
    return found

engine_args = EngineArgs(model=MODEL, enable_lora=True, max_loras=1, max_lora_rank=8, max_num_seqs=4, dtype="float32")
engine = LLMEngine.from_engine_args(engine_args)
stepped = process_requests(engine, create_test_prompts(ADAPTER))
engine.close()
llm = LLM(**dataclasses.asdict(engine_args))
lora = LoRARequest("sql-lora", 1, ADAPTER)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
outputs = llm.generate(["hello", "hello"], params, lora_request=[None, lora])
assert stepped == {"0": outputs[0].outputs[0].text, "1": outputs[1].outputs[0].text}
assert stepped["0"] != stepped["1"]
"""


def test_lora_programs(tmp_path: Path) -> None:
    model = make_tiny_chat(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "model", 1)
    space: dict[str, Any] = {"MODEL": model, "ADAPTER": adapter}
    program = f"import dataclasses\nfrom draftwise import *\n{MULTILORA}"
    try:
        exec(compile(program, "<multilora>", "exec"), space)
    finally:
        space["llm"].close()


def test_every_name_is_there_and_only_public_names_are_taken() -> None:
    import draftwise

    space: dict[str, Any] = {}
    exec("from draftwise import *", space)
    assert set(draftwise.__all__) <= set(space)
    assert draftwise.AsyncLLMEngine is AsyncLLM


@pytest.mark.parametrize(
    "name",
    [
        "embed", "encode", "classify", "score", "reward", "beam_search", "sleep", "wake_up", "collective_rpc",
        "apply_model", "start_profile", "stop_profile", "pause_generation", "update_weights", "do_log_stats",
        "pin_lora", "reset_mm_cache", "enqueue", "wait_for_completion",
    ],
)  # fmt: skip
def test_what_is_absent_says_so(name: str) -> None:
    for kind in (LLM, LLMEngine, AsyncLLM) if name != "enqueue" else (LLM,):
        engine = kind.__new__(kind)
        with pytest.raises(RequestError, match=f"^{name}: "):
            getattr(engine, name)(["text"], level=1)


def test_objects_of_vllm_behind_an_engine_are_named_and_not_there() -> None:
    llm: Any = LLM.__new__(LLM)
    assert not hasattr(llm, "llm_engine")
    with pytest.raises(AttributeError, match=r"no attribute 'llm_engine'; LLM is no shell"):
        llm.llm_engine.model_config  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'genrate'$"):
        llm.genrate("text")


def test_an_engine_of_engine_args() -> None:
    with LLM.from_engine_args(EngineArgs(model=MODEL, max_model_len=64)) as llm:
        assert llm.max_model_len == 64


def test_engines_of_every_kind_say_the_same_of_themselves() -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    messages = [{"role": "user", "content": "hello"}]
    engines: list[Any] = [LLM(MODEL, max_model_len=64), LLMEngine(MODEL, max_model_len=64)]
    engines.append(AsyncLLM(MODEL, max_model_len=64))
    llm, stepped, _ = engines
    try:
        for engine in engines:
            assert engine.max_model_len == engine.config.max_model_len == 64
            assert engine.vocab_size == llm.vocab_size and engine.guarantees == llm.guarantees
            assert engine.get_default_sampling_params() == llm.get_default_sampling_params()
            assert {metric.name for metric in engine.get_metrics()} == {m.name for m in llm.get_metrics()}
            plain = engine.apply_chat_template(messages, chat_template="{{ messages[0].content }}")
            assert plain["prompt_token_ids"] == llm.get_tokenizer().encode("hello")
        stepped.add_request("0", "def a(", params)
        assert not stepped.reset_prefix_cache() or stepped.stats().num_used_blocks == 0
        while stepped.has_unfinished_requests():
            stepped.step()
        stepped.reset_drafters()
        assert stepped.reset_prefix_cache() and stepped.stats().num_requests_finished == 1
        stepped.check_integrity()
    finally:
        for engine in engines:
            engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        stepped.stats()


def test_health_under_the_names_of_vllm() -> None:
    async def programme() -> None:
        engine = AsyncLLM(MODEL, max_model_len=64)
        await engine.check_health()
        assert engine.is_running and not engine.is_stopped and not engine.errored
        assert engine.get_num_unfinished_requests() == 0
        stream = engine.submit("def a(", SamplingParams(max_tokens=8))
        assert engine.get_num_unfinished_requests() == 1
        stream.close()
        engine.shutdown()
        assert engine.errored and engine.is_stopped and not engine.is_running
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.check_health()
        assert str(engine.dead_error) == "the engine was closed"

    asyncio.run(programme())


def test_fields_of_a_prompt_that_are_none_are_as_if_absent() -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    ids = {
        "prompt": None,
        "prompt_token_ids": [5, 6, 7],
        "multi_modal_data": None,
        "mm_processor_kwargs": None,
    }
    text = {"prompt": "def a(", "prompt_token_ids": None, "multi_modal_data": None}
    with LLM(MODEL, max_model_len=64) as llm:
        plain = llm.generate([[5, 6, 7], "def a("], params)
        assert [o.outputs for o in llm.generate([ids, text], params)] == [o.outputs for o in plain]
        with pytest.raises(RequestError, match=r"^multi_modal_data: a prompt is a text or its token ids"):
            llm.generate({"prompt": "def a(", "multi_modal_data": {"image": 1}})
        with pytest.raises(RequestError, match=r"^unknown prompt field 'promt'; did you mean 'prompt'"):
            llm.generate({"promt": None})
        with pytest.raises(RequestError, match=r"^a prompt is a string"):
            llm.generate({"prompt": None})


def test_parameters_of_which_some_are_none() -> None:
    made = SamplingParams.from_optional(
        n=None, temperature=None, top_p=0.9, stop=None, logit_bias=None, thinking_token_budget=None
    )
    assert made == SamplingParams(top_p=0.9)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16
    with pytest.raises(RequestError, match="unknown sampling parameter 'thinking_token_budget'"):
        SamplingParams.from_optional(thinking_token_budget=5)
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature'"):
        SamplingParams.from_optional(temprature=None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tokenizer_mode", "mistral"), ("load_format", "dummy"), ("hf_overrides", {"rope_theta": 1}),
        ("cpu_offload_gb", 4), ("runner", "pooling"), ("task", "embed"), ("generation_config", "vllm"),
        ("scheduling_policy", "lifo"), ("logits_processors", [print]), ("enable_log_requests", True),
    ],
)  # fmt: skip
def test_values_that_would_change_something_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: .* is not supported: "):
        LLM(MODEL, **{option: value})
    with pytest.raises(ConfigError, match=f"^{option}: "):
        AsyncLLM.from_engine_args(EngineArgs(model=MODEL, **{option: value}))


def test_an_assigned_field_is_checked_and_a_request_keeps_what_it_was_given() -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    copy = params.clone()
    with pytest.raises(RequestError, match="top_p is 2"):
        params.top_p = 2.0
    assert params == copy, "a refused value changes nothing"
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        params.max_token = 3  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="extra_args"):
        params.extra_args = {"x": 1}
    params.stop = ["a", "b"]
    assert params.stop == ("a", "b") and copy.stop == ()
    engine = LLMEngine(MODEL, max_model_len=64)
    try:
        engine.add_request("r", "def a(", copy)
        copy.max_tokens = 1
        with pytest.raises(RequestError, match="in use"):
            engine.add_request("r", "def b(", copy)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == 4
        engine.add_request("s", [5, 6], copy)
        engine.abort_request(["s", "nobody"])
        engine.step()
        assert engine.get_num_unfinished_requests() == 0 and not engine.has_unfinished_requests()
    finally:
        engine.close()


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    model = Path(make_tiny_chat(tmp_path / "model"))
    advice = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "repetition_penalty": -1}
    (model / "generation_config.json").write_text(json.dumps(advice))
    with LLM(str(model), num_kv_blocks=16, max_model_len=64) as llm:
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 20, 7)
    assert params.repetition_penalty == 1.0, "a value out of range is left out"
