"""Traces for OpenTelemetry: the same spans, where a company already looks. Optional; lesson 13.

A parent span `llm_request` and one child a stage, with the begin and end of the trace, not of the export. Attributes
are named as vLLM names them (gen_ai.*); what has no name there is minillm.*. Needs opentelemetry-api for
`OpenTelemetry`, and opentelemetry-sdk with an OTLP exporter for `make_exporter`.
"""

from __future__ import annotations

import importlib
from typing import Any

from minillm.errors import MinillmError
from minillm.server.tracing import RequestTrace

ATTRIBUTES = {
    "id": "gen_ai.request.id", "model": "gen_ai.response.model", "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens", "n": "gen_ai.request.n",
    "max_tokens": "gen_ai.request.max_tokens", "status": "http.response.status_code", "route": "http.route",
}  # fmt: skip
TIMES = ("time", "start", "spans", "e2e_ns")
EXPORTERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
)


class OpenTelemetry:
    """An exporter for `Traces`. tracer: of any OpenTelemetry provider. close: called when the server ends."""

    def __init__(self, tracer: Any, close: Any = None):
        self.api = _need("opentelemetry.trace")
        self.propagation = _need("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        self.tracer, self._close = tracer, close

    def __call__(self, trace: RequestTrace, record: dict[str, Any]) -> None:
        api, begin = self.api, round(trace.wall * 1e9)
        context = None
        if trace.traceparent:  # one that is malformed gives the empty context: a trace of its own
            context = self.propagation.extract({"traceparent": trace.traceparent})
        spans = trace.spans()
        parent = self.tracer.start_span(
            "llm_request", context=context, kind=api.SpanKind.SERVER, attributes=attributes(record), start_time=begin
        )
        inside = api.set_span_in_context(parent, context)
        for stage, start, end in spans:
            self.tracer.start_span(stage, context=inside, start_time=begin + start).end(end_time=begin + end)
        if (record["status"] or 0) >= 500 or record.get("finish_reason") == "error":
            parent.set_status(api.Status(api.StatusCode.ERROR))
        parent.end(end_time=begin + record["e2e_ns"])

    def close(self) -> None:
        if self._close is not None:
            self._close()


def attributes(record: dict[str, Any]) -> dict[str, Any]:
    """A record as attributes: everything but the times, which the spans are. Durations in seconds, as vLLM's."""
    out = {
        ATTRIBUTES.get(name, f"minillm.{name}"): value
        for name, value in record.items() if name not in TIMES and value not in (None, "")
    }  # fmt: skip
    end = {stage: e / 1e9 for stage, _, e in record["spans"]}
    took = {stage: (e - b) / 1e9 for stage, b, e in record["spans"]}
    out["gen_ai.latency.e2e"] = record["e2e_ns"] / 1e9
    for stage, name in (("queue", "queue"), ("prefill", "model_prefill"), ("decode", "model_decode")):
        if stage in took:
            out[f"gen_ai.latency.time_in_{name}"] = took[stage]
    if "decode" in took and "prefill" in end:
        out["gen_ai.latency.time_to_first_token"] = end["prefill"]
    return out


def make_exporter(endpoint: str, service_name: str = "minillm") -> OpenTelemetry:
    """An exporter over OTLP to a collector's URL. Raises MinillmError if a package is missing."""
    sdk, export = _need("opentelemetry.sdk.trace"), _need("opentelemetry.sdk.trace.export")
    resources, exporter = _need("opentelemetry.sdk.resources"), _exporter()
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": service_name}))
    provider.add_span_processor(export.BatchSpanProcessor(exporter(endpoint=endpoint)))
    return OpenTelemetry(provider.get_tracer("minillm.server"), provider.shutdown)


def _exporter() -> Any:
    for name in EXPORTERS:
        try:
            return importlib.import_module(name).OTLPSpanExporter
        except ModuleNotFoundError:
            continue
    raise _missing(EXPORTERS[0])


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise _missing(name) from None


def _missing(name: str) -> MinillmError:
    return MinillmError(
        f"exporting traces needs {name.split('.proto')[0]}, which is not installed; "
        "run: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
    )
