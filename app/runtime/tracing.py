"""Spans of requests and of signing (OpenTelemetry), sent by OTLP/HTTP. Imported only when ``tracing.endpoint`` is set:
its packages are in the extra ``tracing``.

A request has a span where its ``traceparent`` is sampled, as a child of the caller's. A write has two children, where
their times are known when it is answered, however many records it has::

    METHOD route    from the first work on the request to its answer
      fsync         from the first record's entry into the WAL until the last is durable
      chain         from when the first is durable until the last is chained; only of answers that waited for it

    waiting spans <= QUEUE_MAX

The SDK sends in a thread of its own. A span beyond the queue is dropped: a request never waits for the endpoint.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from requests import Response, Session
from requests.adapters import HTTPAdapter

from app.runtime.state.node import Node
from ledger.positions import Lsn

QUEUE_MAX: Final = 4096
"""Spans that wait to be sent."""
BATCH_MAX: Final = 512
"""Spans in one request to the endpoint."""
SEND_INTERVAL_MS: Final = 1000
SEND_TIMEOUT_S: Final = 5.0
"""Longest that one batch is sent and retried; then it is dropped."""
ANSWER_BYTES_MAX: Final = 64 * 1024
_SAMPLED: Final = 1
_SERVER_ERROR: Final = 500

log = structlog.get_logger()


class Tracing:
    """Makes the spans of one node."""

    def __init__(self, endpoint: str, node: Node) -> None:
        # The SDK logs each failure, and each span that it drops; ``_Exporter`` logs the first.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._node = node
        self._processor = BatchSpanProcessor(
            _Exporter(endpoint),
            max_queue_size=QUEUE_MAX,
            schedule_delay_millis=SEND_INTERVAL_MS,
            max_export_batch_size=BATCH_MAX,
        )
        named = {"service.name": "tallystick", "service.instance.id": node.node_id}
        provider = TracerProvider(ALWAYS_ON, Resource.create(named), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("tallystick")

    def request(
        self, span: str, method: str, route: str, status: int, seconds: float, lsns: tuple[Lsn, Lsn] | None
    ) -> None:
        """A request that was answered now with ``status``, after ``seconds``; ``span`` is its ``traceparent``, ``lsns``
        the first and the last record that the answer is about."""
        _, trace_id, span_id, flags = span.split("-")
        if not int(flags, 16) & _SAMPLED:
            return
        now_s, now_ns = time.perf_counter(), time.time_ns()
        sampled = TraceFlags(TraceFlags.SAMPLED)
        caller = NonRecordingSpan(SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=sampled))
        began_s = now_s - seconds
        made = self._tracer.start_span(
            f"{method} {route}",
            set_span_in_context(caller, Context()),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route, "http.response.status_code": status},
            start_time=now_ns - int(seconds * 1e9),
        )
        if status >= _SERVER_ERROR:
            made.set_status(StatusCode.ERROR)
        if lsns is not None:
            self._steps(made, *lsns, began_s, now_ns - int(now_s * 1e9))
        made.end(now_ns)

    def _steps(self, request: Span, first: Lsn, last: Lsn, began_s: float, epoch_ns: int) -> None:
        """The children of a write that began at ``began_s`` of a clock that was 0 at ``epoch_ns``. A repeated request
        has none: its records entered before it."""
        rises = self._node.rises
        assert rises is not None
        for name, begin, end in (("fsync", rises.entered, rises.durable), ("chain", rises.durable, rises.chained)):
            from_s, to_s = begin.reached_s(first), end.reached_s(last)
            if from_s is None or to_s is None or not began_s <= from_s <= to_s:
                return
            step = self._tracer.start_span(
                name, set_span_in_context(request, Context()), start_time=epoch_ns + int(from_s * 1e9)
            )
            step.end(epoch_ns + int(to_s * 1e9))

    def signed(self, what: str, tenants: int, seconds: float) -> None:
        """The notary has signed ``what`` of so many tenants, in the last ``seconds``."""
        now_ns = time.time_ns()
        attributes: dict[str, Any] = {"tallystick.signed": what, "tallystick.tenants": tenants}
        self._tracer.start_span("sign", Context(), attributes=attributes, start_time=now_ns - int(seconds * 1e9)).end(
            now_ns
        )

    def close(self, timeout_s: float) -> None:
        """Send the waiting spans, for at most ``timeout_s``. A thread that then still sends ends with the process."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(timeout_s)


class _Exporter(SpanExporter):
    """Logs the first failure, and that it is over."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        session = Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, _BoundedAnswers())
        self._otlp = OTLPSpanExporter(endpoint, timeout=SEND_TIMEOUT_S, session=session)
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``."""
        result = self._otlp.export(spans)
        if (is_failing := result is not SpanExportResult.SUCCESS) != self._is_failing:
            self._is_failing = is_failing
            if is_failing:
                log.warning("spans_not_sent", endpoint=self._endpoint, do="check tracing.endpoint; spans are dropped")
            else:
                log.info("spans_sent_again", endpoint=self._endpoint)
        return result

    def shutdown(self) -> None:
        """End a retry."""
        self._otlp.shutdown()  # type: ignore[no-untyped-call]


class _BoundedAnswers(HTTPAdapter):
    """The SDK reads the whole answer of the endpoint: it gets the first bytes."""

    def send(self, *given: Any, **more: Any) -> Response:
        """The answer to a request."""
        answer = super().send(*given, **more)
        raw, answer.raw = answer.raw, io.BytesIO(answer.raw.read(ANSWER_BYTES_MAX, decode_content=False))
        raw.close()
        return answer
