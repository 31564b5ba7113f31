"""OpenTelemetry traces: a span per request with its phases as children, sent over OTLP/HTTP.

Attributes have the names of OpenTelemetry's semantic conventions for generative AI and those of vLLM where the
conventions have none; what speculation did is under ``draftwise.speculation.``. No text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from draftwise import __version__
from draftwise.engine.outputs import RequestOutput, SpeculationMetrics
from draftwise.errors import ConfigError, install
from draftwise.sampling.params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("draftwise.server")

_GRPC_PORT = 4317


class Spans:
    """Makes and sends the spans of one server."""

    def __init__(self, endpoint: str, model_name: str, exporter: SpanExporter | None = None) -> None:
        """``endpoint``: URL of a collector that takes OTLP over HTTP; without a path, ``/v1/traces`` is added.
        ``exporter``: instead of one to that URL, and called at once.

        The environment's ``OTEL_*`` variables hold for the rest (service name, sampler, headers, batches).

        Raises ConfigError: no such URL, or the packages of the extra ``otel`` are missing.
        """
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs the package {error.name!r}: {install('otel')}"
            ) from None
        # Service name and version can be given by OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which win.
        resource = Resource({"service.name": "draftwise", "service.version": __version__}).merge(_named())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
            if exporter is None
            else SimpleSpanProcessor(exporter)
        )
        self._tracer = self._provider.get_tracer("draftwise.server", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._internal = SpanKind.SERVER, SpanKind.INTERNAL
        self._error = StatusCode.ERROR
        self._inside = set_span_in_context
        self._model_name = model_name

    def request(
        self, headers: Mapping[str, str], operation: str, request_id: str, params: SamplingParams
    ) -> RequestSpans:
        """Begin now. ``headers``: of the HTTP request, for ``traceparent`` and ``tracestate``; ``operation``:
        ``chat`` or ``text_completion``."""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "draftwise",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
            "gen_ai.request.n": params.n,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        parent = self._propagator.extract(
            {k: v for k, v in headers.items() if k in ("traceparent", "tracestate")}
        )
        return RequestSpans(self, parent, request_id, attributes)

    def emit(
        self, parent: Any, start: int, attributes: Mapping[str, Any], output: RequestOutput | None
    ) -> None:
        """The spans of one prompt that is over now. ``start`` in ns since 1970; ``output``: the last one seen, None
        if there was none."""
        now = time.time_ns()
        phases, end = _phases(start, now, output)
        span = self._tracer.start_span(
            "llm_request",
            parent,
            kind=self._server,
            start_time=start,
            attributes={**attributes, **_facts(output)},
        )
        inside = self._inside(span)
        for name, begin, stop in phases:
            self._tracer.start_span(name, inside, kind=self._internal, start_time=begin).end(stop)
        reasons = [] if output is None else [c.finish_reason for c in output.outputs]
        if not reasons or any(reason in (None, "abort", "error") for reason in reasons):
            failed = "error" in reasons
            span.set_attribute("error.type", "generation_failed" if failed else "cancelled")
            span.set_status(self._error)
        span.end(end)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


class RequestSpans:
    """The spans of one HTTP request: one per prompt."""

    def __init__(self, spans: Spans, parent: Any, request_id: str, attributes: dict[str, Any]) -> None:
        self._spans = spans
        self._parent = parent
        self._start = time.time_ns()
        self._request_id = request_id
        self._attributes = attributes

    def end(self, outputs: Sequence[RequestOutput | None]) -> None:
        """The last output of each prompt, None for one that had none."""
        for i, output in enumerate(outputs):
            name = self._request_id if len(outputs) == 1 else f"{self._request_id}-{i}"
            ids = {"gen_ai.request.id": name, "gen_ai.response.id": self._request_id}
            self._spans.emit(self._parent, self._start, {**self._attributes, **ids}, output)


def traces_url(endpoint: str) -> str:
    """The URL to post to. Example: ``http://host:4318`` is ``http://host:4318/v1/traces``. Raises ConfigError."""
    parts = urlsplit(endpoint)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(
            f"otlp_traces_endpoint: expected a URL like http://localhost:4318, got {endpoint!r}"
        )
    if port == _GRPC_PORT:
        logger.warning(
            "otlp_traces_endpoint: %d is commonly the port of OTLP over gRPC; spans are sent over HTTP, whose port "
            "is 4318", port
        )  # fmt: skip
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


def _named() -> Any:
    """The environment's description of this service, and nothing else."""
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


def _phases(start: int, now: int, output: RequestOutput | None) -> tuple[list[tuple[str, int, int]], int]:
    """([name, begin, end], end of all) in ns. A phase that began and did not end lasts until now.

    Example: queue_time 1, ttft 3, e2e 7 (seconds) is queue 0..1, prefill 1..3, decode 3..7.
    """
    metrics = None if output is None else output.metrics
    finished = output is not None and output.finished
    spent = metrics.e2e if metrics is not None and finished and metrics.e2e is not None else None
    end = now if spent is None else start + round(spent * 1e9)
    bounds = [start]
    for seconds in (None, None) if metrics is None else (metrics.queue_time, metrics.ttft):
        if seconds is None:
            break
        bounds.append(min(start + round(seconds * 1e9), end))
    bounds.append(end)
    names = ("queue", "prefill", "decode")
    return [(n, a, b) for n, a, b in zip(names, bounds, bounds[1:], strict=False)], end


def _facts(output: RequestOutput | None) -> dict[str, Any]:
    if output is None:
        return {}
    metrics = output.metrics
    prompt = len(output.prompt_token_ids)
    completion = sum(len(c.token_ids) for c in output.outputs)
    facts: dict[str, Any] = {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": completion,
        "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": prompt,  # vLLM's names
        "gen_ai.usage.completion_tokens": completion,
        "gen_ai.usage.num_sequences": len(output.outputs),
        "gen_ai.response.finish_reasons": [c.finish_reason or "abort" for c in output.outputs],
        "draftwise.num_preemptions": metrics.num_preemptions,
    }
    queue, ttft, e2e = metrics.queue_time, metrics.ttft, metrics.e2e
    for name, value in (
        ("time_in_queue", queue),
        ("time_to_first_token", ttft),
        ("e2e", e2e),
        ("time_in_model_prefill", None if queue is None or ttft is None else ttft - queue),
        ("time_in_model_decode", None if ttft is None or e2e is None else e2e - ttft),
        ("time_in_model_inference", None if queue is None or e2e is None else e2e - queue),
    ):
        if value is not None:
            facts[f"gen_ai.latency.{name}"] = value
    return {**facts, **_speculation(metrics.speculation)}


def _speculation(spec: SpeculationMetrics) -> dict[str, Any]:
    drafted = {method: steps for method, steps in spec.steps_by_method.items() if method != "none"}
    facts: dict[str, Any] = {
        "draftwise.speculation.method": max(drafted, key=lambda m: drafted[m]) if drafted else "none",
        "draftwise.speculation.num_steps": spec.num_steps,
        "draftwise.speculation.num_drafts": spec.num_drafts,
        "draftwise.speculation.num_draft_tokens": spec.num_draft_tokens,
        "draftwise.speculation.num_accepted_tokens": spec.num_accepted_tokens,
    }
    if spec.mean_acceptance_length is not None:
        facts["draftwise.speculation.mean_acceptance_length"] = spec.mean_acceptance_length
    return facts
