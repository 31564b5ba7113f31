"""OpenTelemetry traces of requests: what is in them, and that a collector gets them."""

from __future__ import annotations

import http.server
import json
import re
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from draftwise import AsyncLLM
from draftwise.errors import ConfigError
from draftwise.server.spans import Spans, traces_url
from tests.e2e.test_server_process import serve
from tests.fakes.running_server import RunningServer
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

pytest.importorskip("opentelemetry.sdk.trace")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=256, speculation_control="static")
    yield engine
    engine.close()


@pytest.fixture
def exporter() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def by_name(exporter: Any) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_span_with_its_phases(llm: AsyncLLM, exporter: Any) -> None:
    spans = Spans("http://localhost:4318", "tiny", exporter)
    with RunningServer(llm, spans=spans) as server:
        body = {"prompt": "abcabcabc", "max_tokens": 24, "temperature": 0, "speculation": {"method": "ngram"},
                "return_metrics": True}  # fmt: skip
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        status, _, data = server.request("POST", "/v1/completions", body, headers)
        assert status == 200
    answer = json.loads(data)
    found = by_name(exporter)
    assert set(found) == {"llm_request", "queue", "prefill", "decode"}
    whole = found["llm_request"]
    assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == PARENT
    assert whole.kind.name == "SERVER" and whole.status.status_code.name == "UNSET"
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent.span_id == whole.context.span_id for phase in phases)
    assert phases[0].start_time == whole.start_time and phases[-1].end_time == whole.end_time
    assert all(a.end_time == b.start_time for a, b in pairwise(phases))
    facts, metrics = whole.attributes, answer["metrics"]
    assert facts["gen_ai.response.id"] == answer["id"] and facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.usage.output_tokens"] == facts["gen_ai.usage.completion_tokens"] == 24
    assert facts["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert facts["gen_ai.latency.time_to_first_token"] == metrics["ttft"]
    assert facts["gen_ai.response.finish_reasons"] == ("length",)
    said = metrics["speculation"]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length"):
        assert facts[f"draftwise.speculation.{name}"] == said[name]
    assert said["num_drafts"] > 0 and facts["draftwise.speculation.method"] == "ngram"
    assert not any("abcabc" in str(value) for value in facts.values()), "no text of the prompt"


def test_every_kind_of_request(llm: AsyncLLM, exporter: Any) -> None:
    spans = Spans("http://localhost:4318", "tiny", exporter)
    with RunningServer(llm, spans=spans) as server:
        messages = [{"role": "user", "content": "hi"}]
        server.request("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})
        server.request(
            "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "stream": True, "n": 2}
        )
        server.request("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 2})
        server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": -3})  # refused: nothing ran
        server.request("GET", "/v1/models", headers={"traceparent": "nonsense"})
    whole = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    ids = [span.attributes["gen_ai.request.id"] for span in whole]
    assert (
        len(ids) == 4
        and [i[-2:] for i in ids[:2]] == ["-0", "-1"]
        and len({span.context.trace_id for span in whole}) == 4
    )
    assert [span.attributes["gen_ai.usage.num_sequences"] for span in whole] == [1, 1, 2, 1]
    assert [span.attributes["gen_ai.operation.name"] for span in whole[2:]] == ["chat", "chat"]


def test_a_request_that_is_given_up(folder: str, exporter: Any) -> None:
    from transformers import AutoTokenizer

    engine = ScriptedEngine(folder, AutoTokenizer.from_pretrained(folder), ["a"], hang=True)
    with RunningServer(engine, spans=Spans("http://localhost:4318", "tiny", exporter)) as server:
        assert server.request("POST", "/v1/completions", {"prompt": "a", "timeout": 0.2})[0] == 503
    whole = by_name(exporter)["llm_request"]
    assert whole.status.status_code.name == "ERROR" and whole.attributes["error.type"] == "cancelled"


def test_what_is_no_endpoint(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert traces_url("http://host:4318") == traces_url("http://host:4318/") == "http://host:4318/v1/traces"
    assert traces_url("https://host/otel/x") == "https://host/otel/x"
    for wrong in ("localhost:4318", "grpc://host:1", "http://", "http://host:x"):
        with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
            traces_url(wrong)
    traces_url("http://host:4317")
    assert "gRPC" in caplog.text
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"\.\[otel\]"):
        Spans("http://host:4318", "tiny")


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what is posted, as a collector does."""

    got: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_collector_gets_them() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Taking", (Collector,), {"got": got}))
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    server = serve("--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_address[1]}")
    try:
        assert server.stdout is not None
        url = re.search(r"http://\S+", server.stdout.readline())
        assert url is not None
        asked = urllib.request.Request(
            url[0] + "/v1/completions",
            json.dumps({"prompt": "def f(", "max_tokens": 8}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer_id = json.load(answer)["id"]
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
        collector.shutdown()
        thread.join()
        collector.server_close()
    assert server.returncode == 0, errors
    assert {path for path, _ in got} == {"/v1/traces"}
    requests = [ExportTraceServiceRequest.FromString(body) for _, body in got]
    resources = [r for request in requests for r in request.resource_spans]
    named = {a.key: a.value.string_value for a in resources[0].resource.attributes}
    assert named["service.name"] == "draftwise"
    spans = [span for r in resources for scope in r.scope_spans for span in scope.spans]
    assert [span.name for span in spans].count("llm_request") == 1
    whole = next(span for span in spans if span.name == "llm_request")
    assert answer_id in {a.value.string_value for a in whole.attributes}
