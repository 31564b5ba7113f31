"""Parts of the server by themselves: tool calls in pieces, traces, bodies, configuration files."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.cli.errors import UsageError
from draftwise.cli.main import build_parser, normalise
from draftwise.cli.serve import BOOLEANS, settings
from draftwise.config import resolve_engine_config
from draftwise.engine.outputs import Logprob
from draftwise.errors import ConfigError, ContextLengthError, LimitError, RequestError
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import StepTrace
from draftwise.server.config import ServerConfig
from draftwise.server.config_file import read_config_file, split_options
from draftwise.server.errors import APIError, from_exception
from draftwise.server.logprobs import FLOOR, CompletionLogprobs, chat_logprobs
from draftwise.server.page import Page
from draftwise.server.params import chat_params
from draftwise.server.protocol import ChatBody
from draftwise.server.sse import TextEvents, event
from draftwise.server.tool_formats import CallPiece, Found, HermesParser
from draftwise.server.tools import ToolPlan, plan_tools, whole_calls
from draftwise.server.trace import Tracer, token_sources

# ------------------------------------------------------------------------------------------------ tools

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def fed(text: str, cuts: list[int], **options: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = HermesParser(**options)
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    found: Found = []
    for low, high in pairwise(edges):
        found += parser.push(text[low:high])
    found += parser.finish()
    shown = "".join(part for part in found if isinstance(part, str))
    calls = whole_calls(part for part in found if isinstance(part, CallPiece))
    return shown, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


@given(st.lists(st.integers(0, 500)))
def test_tool_calls_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    other = CALL.replace('"f"', '"g"')
    text = f"Well < then\n{CALL}\n{other} "
    shown, calls = fed(text, cuts)
    assert (shown.strip(), [name for name, _ in calls]) == ("Well < then", ["f", "g"])
    assert calls[0][1] == '{"a": 1}'


@given(st.text(alphabet="<tol_ca>/ \n", max_size=40), st.lists(st.integers(0, 50)))
def test_text_without_calls_is_kept(text: str, cuts: list[int]) -> None:
    if "<tool_call>" not in text:
        assert fed(text + " broken", cuts) == (text + " broken", [])


def test_tool_calls_at_the_edges() -> None:
    broken = "<tool_call>broken</tool_call>"
    assert fed(broken, []) == (broken, [])
    assert fed("<tool_call>{broken", []) == ("<tool_call>{broken", [])
    assert fed(CALL.removesuffix("</tool_call>"), [])[1] == [
        ("f", '{"a": 1}')
    ]  # cut by max_tokens at its end
    assert len(fed(CALL + CALL, [], only_one=True)[1]) == 1
    assert fed("x <tool", []) == ("x <tool", [])


# ------------------------------------------------------------------------------------------------ traces


def test_sources_of_tokens() -> None:
    tracer = Tracer(str)
    steps = tracer.steps(
        0,
        [
            StepTrace("none", (), (), (), (7,)),
            StepTrace("ngram", (1, 2, 3), (-1, 0, 1), (0,), (1, 9)),  # 2 refused
            StepTrace("ngram", (1, 2), (-1, 0), (0, 1), (1, 2, 9)),  # all accepted
            StepTrace("tree", (5, 6, 8), (-1, -1, 1), (1, 2), (6, 8, 9)),  # the second branch, to its leaf
            StepTrace("tree", (5, 6, 8), (-1, -1, 1), (0,), (5, 9)),  # a leaf that has no children
            StepTrace("ngram", (1, 2), (-1, 0), (0, 1), (1,)),  # cut by a stop condition
        ],
    )
    sources = [[t["source"] for t in step["tokens"]] for step in steps]
    assert sources == [
        ["target"],
        ["draft", "recovered"],
        ["draft", "draft", "bonus"],
        ["draft", "draft", "bonus"],
        ["draft", "bonus"],
        ["draft"],
    ]
    assert [t["output_index"] for step in steps for t in step["tokens"]] == list(range(12))
    assert steps[1]["draft"][2] == {"token_id": 3, "text": "3", "parent": 1}
    assert tracer.steps(1, [StepTrace("none", (), (), (), (7,))])[0]["tokens"][0]["output_index"] == 0


def test_logprobs_have_no_infinities_and_ranked_alternatives_with_the_token_itself() -> None:
    position = {4: Logprob(float("-inf"), 9, "d"), 1: Logprob(-0.1, 1, "a"), 2: Logprob(-2.0, 2, "b")}
    chat = chat_logprobs([4], [position], 2, bytes_of=bytes)["content"][0]
    assert chat["logprob"] == FLOOR and [t["token"] for t in chat["top_logprobs"]] == ["a", "b", "d"]
    for count, tokens in ((0, []), (1, ["a"]), (2, ["a", "b"])):
        chat = chat_logprobs([1], [position], count, bytes_of=bytes)["content"][0]
        assert [t["token"] for t in chat["top_logprobs"]] == tokens
    form = CompletionLogprobs(1)
    first = form.generated([4], [position])
    assert first["top_logprobs"] == [{"a": -0.1, "d": FLOOR}] and form.generated([1], [position])[
        "text_offset"
    ] == [1]


# ------------------------------------------------------------------------------------------------ errors


def test_errors_name_their_field() -> None:
    error = from_exception(RequestError("temperature is -1; it must be a finite number"))
    assert (error.status, error.param) == (400, "temperature")
    assert from_exception(RequestError("speculation: method 'x' is not loaded")).param == "speculation"
    limit = from_exception(LimitError("stop", "65 strings", "max_stop_strings", 64))
    assert (limit.status, limit.param, limit.code) == (400, "stop", "max_stop_strings")
    # Clients fall back to another model, or shorten the prompt, on exactly this.
    for long in (LimitError("prompt", "9 characters", "max_prompt_chars", 8), ContextLengthError("prompt")):
        assert from_exception(long).code == "context_length_exceeded"
        # OpenAI's client shows the message alone, and LangChain looks for the code in what it shows.
        assert from_exception(long).body()["error"]["message"].endswith("(context_length_exceeded)")
    internal = from_exception(ZeroDivisionError("secret"))
    assert internal.status == 500 and "secret" not in str(internal.body())


def test_a_response_format_beside_structured_outputs_is_a_contradiction() -> None:
    def params(**fields: Any) -> SamplingParams:
        body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
        return chat_params(body, ServerConfig(), None)

    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    outputs = {"regex": "a+"}
    with pytest.raises(APIError, match="response_format and structured_outputs contradict") as error:
        params(response_format=form, structured_outputs=outputs)
    assert (error.value.status, error.value.param) == (400, "response_format")
    # Each alone, and a format that asks for nothing, are fine.
    one = params(response_format=form).structured_outputs
    assert one is not None and json.loads(one.schema) == {"type": "integer"}
    for fields in (
        {"structured_outputs": outputs},
        {"structured_outputs": outputs, "response_format": {"type": "text"}},
    ):
        other = params(**fields).structured_outputs
        assert other is not None and other.regex == "a+"


# ----------------------------------------------------------------------------------------- configuration


def arguments(*argv: str) -> argparse.Namespace:
    return build_parser("serve").parse_args(normalise(["serve", *argv], BOOLEANS))


def test_limits_are_flags_and_lines_of_the_file(tmp_path: Path) -> None:
    flags = arguments(
        "--max-header-size", "1000", "--max-headers", "9", "--max-body-depth", "5", "--max-body-fields", "6",
        "--max-body-values", "7", "--max-body-memory", "8", "--header-timeout", "0.5", "--body-timeout", "2",
        "--unknown-fields", "warn", "--allowed-hosts", '["a.example", "*.b.example"]',
        "--request-limits", '{"max_choices": 3}',
    )  # fmt: skip
    engine, server = settings(flags)
    limits = resolve_engine_config(device="cpu", **engine).request_limits
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-header-size: 1000\nmax_headers: 9\nmax_body_depth: 5\nmax_body_fields: 6\nmax_body_values: 7\n"
        "max_body_memory: 8\nheader_timeout: 0.5\nbody_timeout: 2\nunknown_fields: warn\n"
        'allowed_hosts: [a.example, "*.b.example"]\nrequest_limits: {max_choices: 3}\n'
    )
    from_file, same = settings(arguments("--config", str(file)))
    assert same == server and resolve_engine_config(device="cpu", **from_file).request_limits == limits
    assert (server.max_header_size, server.max_body_values, server.header_timeout) == (1000, 7, 0.5)
    assert server.allowed_hosts == ("a.example", "*.b.example") and limits.max_choices == 3
    assert settings(arguments("--allowed-hosts", "*"))[1].allowed_hosts == ("*",)
    with pytest.raises(
        ConfigError, match="unknown_fields: expected refuse or warn, got 'warm'; did you mean 'warn'"
    ):
        settings(arguments("--unknown-fields", "warm"))
    with pytest.raises(ConfigError, match="did you mean 'max_choices'"):
        resolve_engine_config(device="cpu", request_limits={"max_choice": 3})


def test_flags_of_other_servers() -> None:
    engine, server = settings(
        arguments(
            "M", "--speculative_config", '{"method": "ngram", "num_speculative_tokens": 2}', "--served-model-name", "a",
            "--max_num_seqs", "10", "--enforce-eager", "--port", "20004", "--api-key", "k", "--api_key", "l",
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-stats",
        )
    )  # fmt: skip
    assert engine["model"] == "M" and engine["enforce_eager"] == "true" and engine["max_num_seqs"] == "10"
    assert engine["speculative_config"] == [{"method": "ngram", "num_speculative_tokens": 2}]
    assert server.model_names == ("a",) and server.port == 20004 and server.api_keys == ("k", "l")
    assert server.log_interval == 0
    engine, server = settings(arguments("M", "--speculative-model", "D", "--num-speculative-tokens", "5"))
    assert engine["speculative_model"] == "D" and server.model_names == ("M",)
    with pytest.raises(ConfigError, match="hermes"):
        settings(arguments("--tool-call-parser", "unheard_of"))
    with pytest.raises(UsageError, match="twice"):
        settings(arguments("M", "--model", "N"))


def test_what_is_not_there_is_refused_by_name() -> None:
    """The configuration of vllm-surface.md for another vendor's machines, one refusal after the other."""
    common = [
        "M", "--served-model-name", "dsv3", "--max-model-len", "36768", "--max-num-batched-tokens", "5000",
        "--seed", "1024",
        "--data-parallel-size", "1", "--trust-remote-code", "--gpu-memory-utilization", "0.9",
        "--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}',
    ]  # fmt: skip
    for words, flags in (
        ("ascend", ["--quantization", "ascend"]),
        ("enable_expert_parallel", ["--enable-expert-parallel"]),
    ):
        engine, server = settings(arguments(*common, *flags))
        assert server.model_names == ("dsv3",)
        with pytest.raises(ConfigError, match=words):
            resolve_engine_config(**engine)


@pytest.mark.parametrize(
    ("given", "engine"),
    [
        (
            {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 3},
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        ),
        (
            {"decoding_type": "MTP", "num_nextn_predict_layers": 2},
            {"method": "mtp", "num_speculative_tokens": 2},
        ),
        (
            {"decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model_dir": "D"},
            {"method": "draft_model", "num_speculative_tokens": 4, "model": "D"},
        ),
        (
            {
                "decoding_type": "Eagle",
                "max_draft_len": 3,
                "speculative_model": "E",
                "eagle3_one_model": True,
            },
            {"method": "eagle", "num_speculative_tokens": 3, "model": "E"},
        ),
        ({"method": "ngram"}, {"method": "ngram"}),
    ],
)
def test_speculation_of_tensorrt_llm(given: dict[str, Any], engine: dict[str, Any]) -> None:
    assert split_options({"speculative_config": given}) == ({"speculative_config": engine}, {})


def test_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "max_batch_size: 8\nmax_num_tokens: 512\nkv_cache_config:\n  enable_block_reuse: false\n"
        "  free_gpu_memory_fraction: 0.8\nspeculative_config: {decoding_type: NGram, max_draft_len: 3}\n"
        "cuda_graph_config: {}\nport: 9000\nallowed-origins: ['https://a.example']\n"
    )
    engine, server = read_config_file(str(file))
    assert server == {"port": 9000, "allowed_origins": ("https://a.example",)}
    config = resolve_engine_config(model="M", device="cpu", **engine)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (8, 512)
    assert config.enable_prefix_caching is False and config.speculative[0].num_speculative_tokens == 3
    # Flags win over the file.
    merged, settled = settings(
        arguments("--config", str(file), "--port", "1", "--speculative-method", "none")
    )
    assert settled.port == 1 and merged["speculative_config"] == {"method": "none"}


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 4, "moe_tensor_parallel_size": 1},
         {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
        ({"moe_expert_parallel_size": 1, "moe_tensor_parallel_size": 2, "tensor_parallel_size": 2,
          "enable_attention_dp": False, "context_parallel_size": 1, "gpus_per_node": 8},
         {"tensor_parallel_size": 2}),
    ],
)  # fmt: skip
def test_parallel_sizes_of_files(options: dict[str, Any], engine: dict[str, Any]) -> None:
    assert split_options(options) == (engine, {})


@pytest.mark.parametrize(
    ("text", "engine", "server"),
    [
        (  # as TensorRT-LLM's guides of deployment write them
            """
cuda_graph_config: {enable_padding: true, max_batch_size: 720}
enable_attention_dp: false
moe_config: {backend: TRTLLM}
stream_interval: 20
num_postprocess_workers: 4
enable_autotuner: false
kv_cache_config: {dtype: auto, enable_block_reuse: false, free_gpu_memory_fraction: 0.6}
""",
            {"kv_cache_dtype": "auto", "enable_prefix_caching": False, "gpu_memory_utilization": 0.6},
            {},
        ),
        ("kv_cache_config: {dtype: fp8}", {"kv_cache_dtype": "fp8"}, {}),
        (  # as vLLM's
            """
model: M
host: 127.0.0.1
port: 6379
uvicorn-log-level: info
load-format: auto
tensor-parallel-size: 2
no-enable-prefix-caching: true
enable-auto-tool-choice: true
tool-call-parser: openai
stream-interval: 20
""",
            {"model": "M", "load_format": "auto", "tensor_parallel_size": 2, "enable_prefix_caching": False},
            {"host": "127.0.0.1", "port": 6379, "log_level": "info", "tool_call_parser": "openai"},
        ),
    ],
)
def test_files_of_other_engines_as_they_are(
    text: str, engine: dict[str, Any], server: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert read_config_file(str(file)) == (engine, server)
    resolve_engine_config(**{"model": "M", "device": "cpu", **engine})
    assert settings(arguments("--extra_llm_api_options", str(file)))[1].port == server.get("port", 8000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"uds": "/tmp/socket"}, "it listens at an address"),
        (
            {"tensor_parallel_size": 4, "moe_expert_parallel_size": 2},
            "moe_expert_parallel_size: 2 .*only 1 or 4",
        ),
        ({"enable_attention_dp": True}, "enable_attention_dp: True is not supported"),
        ({"speculative_config": {"decoding_type": "Lookahead"}}, "Lookahead"),
        ({"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layer": 1}}, "did you mean"),
        ({"max_batchsize": 1}, "did you mean 'max_batch_size'"),
        ({"moe_expert_parallel_size": 4}, "moe_expert_parallel_size"),
        ({"kv_cache_config": {"host_cache_size": 1}}, "host_cache_size"),
        ({"port": "x"}, "port"),
        ({"max_batch_size": 1, "max_num_seqs": 2}, "twice"),
    ],
)
def test_files_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        split_options(options)


@pytest.mark.parametrize("text", ["a: [", "- 1", "\x00"])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config"):
        read_config_file(str(tmp_path / "c.yaml"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_config_file(str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000}, {"max_queue": 0}, {"request_timeout": 0.0}, {"drain_timeout": -1.0}, {"api_keys": ("",)},
        {"ssl_keyfile": "x"}, {"model_names": ()}, {"metrics_prefix": "a b"},
        {"allow_credentials": True, "allowed_origins": ("*",)},
    ],
)  # fmt: skip
def test_server_settings_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**settings)


# ------------------------------------------------------------------------------------------------ the page


def test_a_page_may_run_its_own_scripts_and_no_others(tmp_path: Path) -> None:
    script = "let a = 1 < 2"
    (tmp_path / "index.html").write_text(
        f"<style>b {{}}</style><script>{script}</script><script src='/static/p.js'></script>"
    )
    (tmp_path / "p.js").write_text("1")
    (tmp_path / ".hidden").write_text("1")
    (tmp_path / "folder").mkdir()
    page = Page([], tmp_path)
    policy = page.html("index.html").headers["content-security-policy"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}';" in policy and "unsafe" not in policy
    assert page.file("p.js").headers["content-type"].startswith("text/javascript")
    for name in (".hidden", "folder", "../index.html", ""):
        with pytest.raises(APIError):
            page.file(name)


def test_the_plain_page_lists_endpoints() -> None:
    body = bytes(Page([("GET /<x>", "a & b")], Path("nowhere")).html("index.html").body).decode()
    assert "GET /&lt;x&gt;" in body and "a &amp; b" in body


@given(st.text(), st.text())
def test_events_of_text_are_events(text: str, chosen: str) -> None:
    for name in (chosen, "\0text\0"):
        made = TextEvents(lambda part, name=name: {"id": name, "choices": [{"text": part, "n": None}]})  # type: ignore[misc]
        assert made(text) == event({"id": name, "choices": [{"text": text, "n": None}]})


def test_sources_end_with_the_trace() -> None:
    step = StepTrace("ngram", (5, 6), (-1, 0), (0,), (5, 9))
    plain = StepTrace("ngram", (), (), (), (7,))
    assert token_sources((step, plain), 5) == [
        {"source": "draft", "method": "ngram", "position": 0},
        {"source": "recovered", "method": "ngram", "position": 1},
        {"source": "target", "method": "none", "position": 0},
        None,
        None,
    ]
    assert token_sources((step, plain), 2) == token_sources((step,), 2) and token_sources(None, 1) == [None]


def test_allowed_tools_are_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]

    def plan(mode: Any, *names: Any) -> ToolPlan:
        listed = [{"type": "function", "function": {"name": name}} for name in names]
        return plan_tools(tools, {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}})

    free = plan("auto", "g", "f")
    assert free.shown == tools[:2] and free.parse and set(free.schemas) == {"f", "g"}
    forced = plan("required", "g")
    assert forced.shown == tools[1:2] and forced.schema is not None
    assert forced.schema["properties"]["name"] == {"const": "g"}
    for mode, names, words in (
        ("auto", ["f", "x"], "no tool is called 'x'"),
        ("auto", [3], "no tool is called"),
        ("none", ["f"], "needs mode"),
        ("auto", [], "needs mode"),
    ):
        with pytest.raises(APIError, match=words):
            plan(mode, *names)
    for wrong in ({"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": 3}):
        with pytest.raises(APIError, match="needs mode"):
            plan_tools(tools, wrong)
