"""Spans reach a receiver that speaks OTLP over HTTP, with the names that vLLM gives them."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import alignedserve.tracing.traces as traces_file
from alignedserve.core import Opening
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.keys import ANONYMOUS
from alignedserve.jobs.answering import Answering, LineRequest
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import Delivered, Overloaded
from alignedserve.store.job import Endpoint
from alignedserve.text.text_model import TextModel
from alignedserve.tracing.traces import OtlpTraces, check_collector, trace_url
from tests.exposition import value
from tests.gateway.conftest import MODEL, MOST, FakeOwner, Gateway
from tests.tracing.receiver import Receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(receiver: Receiver) -> OtlpTraces:
    return OtlpTraces(trace_url(receiver.url), MODEL)


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


FIRST = Delivered((5,), None, opening=Opening(num_cached=1, waited_s=0.0))


def test_a_request_has_a_span_and_each_of_its_stages(receiver: Receiver, text: TextModel) -> None:
    with closing(traced(receiver)) as traces:
        gateway = Gateway(text, FakeOwner(FIRST, (6,), (2,)), traces=traces)
        answer = gateway.chat(temperature=0.5, top_p=0.9, max_tokens=7)
    assert answer.status_code == 200
    assert set(receiver.paths) == {"/v1/traces"}
    spans = receiver.spans()
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    root, stages = spans["llm_request"], [spans[name] for name in ("queue", "prefill", "decode")]
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.parent_span_id == b""
    assert {(stage.trace_id, stage.parent_span_id) for stage in stages} == {(root.trace_id, root.span_id)}
    ends = [time for stage in stages for time in (stage.start_time_unix_nano, stage.end_time_unix_nano)]
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (root.start_time_unix_nano, root.end_time_unix_nano)
    told = attributes(root)
    assert told["gen_ai.request.id"] == answer.headers["x-request-id"]
    wanted = {
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.n": 1,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reason": "stop",
        "gen_ai.usage.prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.num_sequences": 1,
        "alignedserve.class": "rt",
        "alignedserve.cached_tokens": 1,
    }
    assert {name: told[name] for name in wanted} == wanted
    latencies = {name for name in told if name.startswith("gen_ai.latency.")}
    assert latencies == {
        "gen_ai.latency.e2e",
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.time_in_model_prefill",
        "gen_ai.latency.time_in_model_decode",
        "gen_ai.latency.time_in_model_inference",
    }


def test_it_belongs_to_the_span_of_its_client(receiver: Receiver, text: TextModel) -> None:
    with closing(traced(receiver)) as traces:
        gateway = Gateway(text, FakeOwner((5,), (2,)), traces=traces)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
        body = {"model": MODEL, "prompt": "Hi"}
        assert gateway.ask("POST", "/v1/completions", json=body, headers=headers).status_code == 200
    root = receiver.spans()["llm_request"]
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "vendor=1")


def test_what_its_client_does_not_want_traced_is_not(receiver: Receiver, text: TextModel) -> None:
    with closing(traced(receiver)) as traces:
        gateway = Gateway(text, FakeOwner((5,), (2,)), traces=traces)
        body = {"model": MODEL, "prompt": "Hi"}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert gateway.ask("POST", "/v1/completions", json=body, headers=headers).status_code == 200
    assert receiver.spans() == {}


def test_a_refusal_is_an_error_with_its_reason(receiver: Receiver, text: TextModel) -> None:
    with closing(traced(receiver)) as traces:
        assert Gateway(text, FakeOwner(Overloaded("the queue is full", 1.0)), traces=traces).chat().status_code == 429
    spans = receiver.spans()
    assert set(spans) == {"llm_request", "queue"}
    root = spans["llm_request"]
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "the queue is full")
    assert attributes(root)["error.type"] == "too_late"
    assert "gen_ai.response.finish_reason" not in attributes(root), "its client did not leave"


def test_a_line_of_a_batch_has_spans_too_and_counts_its_choices(receiver: Receiver, text: TextModel) -> None:
    metrics = RequestMetrics()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "n": 2}
    line = LineRequest("req-line", Endpoint.CHAT, body, 3600.0, None, ANONYMOUS)
    with closing(traced(receiver)) as traces:
        answering = Answering(FakeOwner((5,), (2,)), text, (MODEL,), MOST, metrics, traces)
        asyncio.run(answering.answer(line, lambda: None))
    told = attributes(receiver.spans()["llm_request"])
    assert told["gen_ai.request.id"].startswith("req-line")
    assert (told["gen_ai.request.n"], told["alignedserve.class"]) == (2, "be")
    assert value("".join(metrics.blocks()), 'alignedserve:request_params_n_sum{class="be"}') == 2
    assert told["gen_ai.response.finish_reason"] == "stop"


def test_no_request_waits_for_a_collector_that_hangs(receiver: Receiver, text: TextModel) -> None:
    receiver.answers.clear()
    traces = traced(receiver)
    gateway = Gateway(text, FakeOwner((5,), (2,)), traces=traces)
    assert [gateway.chat().status_code for _ in range(3)] == [200] * 3
    traces.close()  # nor does the end of the process
    assert receiver.exports == []
    receiver.answers.set()


def test_a_collectors_address_gets_the_path_of_otlp() -> None:
    assert (
        trace_url("http://collector:4318") == trace_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    )
    assert trace_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "http://"])
def test_an_address_of_another_kind_is_refused_at_the_start(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint must be http://HOST:4318"):
        check_collector(endpoint)


def test_without_the_extra_the_start_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_file, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'alignedserve\[traces\]'"):
        check_collector("http://collector:4318")
    check_collector(None)
