"""Tests of the oracle: it passes what an honest service shows, names each kind of anomaly, and survives any garbage."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.chaos import oracle
from tests.chaos.oracle import BACK_S, BATCH_S, BOUND_S, History, anomalies, main

Events = list[dict[str, Any]]
BODY: dict[str, Any] = {"question": "q", "max_tokens": 3, "stream": True}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
PIECES = [{"text": "a", "tokens": [1]}, {"text": "b", "tokens": [2]}, {"text": "c", "tokens": [3], "finish": "length"}]
ERROR = {"how": "done", "well_formed": True}


class Story:
    """Writes the events of a history, a second apart."""

    def __init__(self) -> None:
        self.events: Events = []

    def tell(self, what: str, **fields: object) -> None:
        self.events.append({"at": float(len(self.events)), "is": what, **fields})

    def call(self, method: str, path: str, end: dict[str, Any], status: int = 200, **asked: Any) -> None:
        """Tell of a call from its beginning to its end; `rows` are lines of a file, `head` is more of its head."""
        id, rows, head = len(self.events), asked.pop("rows", []), asked.pop("head", {})
        pieces, key = asked.pop("pieces", []), asked.pop("key", "load")
        self.tell("call", id=id, key=key, method=method, path=path, **asked)
        if status:
            self.tell("head", id=id, status=status, **head)
        for piece in pieces:
            self.tell("piece", id=id, **piece)
        for row in rows:
            self.tell("line", id=id, **row)
        self.tell("end", id=id, **end)

    def ask(self, pieces: Events = PIECES, end: dict[str, Any] | None = None, **more: Any) -> None:
        end = {"how": "done", "done": True, **USAGE} if end is None else end
        asked: dict[str, Any] = {"pieces": pieces, **BODY, **more}
        self.call("POST", "/v1/completions", end, **asked)

    def refuse(self, status: int = 503, **more: Any) -> None:
        self.ask([], {**ERROR, "code": "not_ready"}, status=status, head={"retry_after": 1}, **more)


def clean() -> Events:
    """Return a history that has some of everything, and no anomaly."""
    story = Story()
    story.tell("limit", key="limited", requests_per_minute=2, tokens_per_minute=20)
    story.ask()
    story.refuse(429, key="limited")
    whole = {"text": "abc", "tokens": [1, 2, 3], "finish": "length"}
    story.ask([whole], {"how": "done", **USAGE}, stream=False)
    for part in ("decode-0", "prefill-0", "gateway-0", "full disks"):
        story.tell("hurt", part=part)
    story.ask(PIECES[:2], {"how": "broken"})
    story.call("POST", "/v1/completions", {"how": "away"}, status=0, **BODY)
    for _ in range(2):
        story.refuse()
    story.tell("right", question="q", text="axy", tokens=[1, 8, 9], finish="length")
    story.ask([{"text": "axy", "tokens": [1, 8, 9], "finish": "length"}])
    _keep(story)
    _run_batch(story)
    story.tell("hurt", part="decode-0")
    _blame(story)
    story.tell("calm")
    story.ask()
    story.ask(
        question="small", key="limited", pieces=[{"text": "z", "tokens": [7], "finish": "stop"}], end=_small_end()
    )
    return story.events


def _small_end() -> dict[str, Any]:
    return {"how": "done", "done": True, "prompt_tokens": 4, "completion_tokens": 1}


def _keep(story: Story) -> None:
    done: dict[str, Any] = {"how": "done"}
    story.call("POST", "/v1/files", {**ERROR, "code": "insufficient_storage"}, status=507, sha256="s")
    for id in ("f1", "f2"):
        story.call("POST", "/v1/files", {**done, "thing": id}, sha256=f"sha-{id}")
    story.call("GET", "/v1/files?limit=10", {**done, "things": ["f2", "f1"]})
    story.call("GET", "/v1/files/f1/content", {**done, "sha256": "sha-f1"})
    story.call("DELETE", "/v1/files/f1", {**done, "thing": "f1"})
    story.call("GET", "/v1/files/f1/content", {**ERROR, "code": "404"}, status=404)
    story.call("GET", "/v1/files", {**done, "things": ["f2"]})
    text = {"text": "kept", "finish": "stop"}
    end = {**done, "thing": "resp1", "sha256": "t", **USAGE}
    story.call("POST", "/v1/responses", end, pieces=[text], question="r", max_tokens=9)
    story.call("GET", "/v1/responses/resp1", {**done, "thing": "resp1", "sha256": "t"}, pieces=[text])


def _run_batch(story: Story) -> None:
    done: dict[str, Any] = {"how": "done", "thing": "b1"}
    rows = [{"custom_id": str(number), "text": "abc", "tokens": [1, 2, 3], "finish": "length"} for number in (1, 0)]
    story.call("POST", "/v1/files", {"how": "done", "thing": "input"}, sha256="i", lines=["q", "q", "q"])
    story.call("POST", "/v1/batches", {**done, "state": "validating", "counts": [0, 0, 0]}, input="input")
    story.call("GET", "/v1/batches/b1", {**done, "state": "validating", "counts": [0, 0, 0]})
    for _ in range(3):
        story.tell("hurt", part="jobs-0")
    story.call("GET", "/v1/batches/b1", {**done, "state": "in_progress", "counts": [3, 1, 0]})
    files = {"output": "out", "errors": "err"}
    for _ in range(2):
        story.call("GET", "/v1/batches/b1", {**done, "state": "completed", "counts": [3, 2, 1], **files})
    story.call("GET", "/v1/files/out/content", {"how": "done", "sha256": "o"}, rows=rows)
    failed = {"custom_id": "2", "code": "job_runner_died"}
    story.call("GET", "/v1/files/err/content", {"how": "done", "sha256": "e"}, rows=[failed])


def _blame(story: Story) -> None:
    """Tell of a request that ended three workers."""
    id = len(story.events)
    story.tell("call", id=id, key="load", method="POST", path="/v1/completions", **BODY)
    for part in ("decode-0", "prefill-1", "decode-0"):
        story.tell("hurt", part=part)
    story.tell("head", id=id, status=500)
    story.tell("end", id=id, code="request_ends_workers", **ERROR)


def kinds(events: Events) -> set[str]:
    return {anomaly.kind for anomaly in anomalies(History(map(json.dumps, events)))}


def test_a_clean_history_has_no_anomaly() -> None:
    history = History(map(json.dumps, clean()))
    assert anomalies(history) == []
    assert {call.outcome for call in history.calls} == {"answered", "broken", "away", "refused", "blamed", "failed"}


def find(events: Events, **wanted: object) -> dict[str, Any]:
    """Return the first event with these fields."""
    return next(event for event in events if wanted.items() <= event.items())


def end_of(events: Events, number: int = 0, **asked: object) -> dict[str, Any]:
    """Return the end of the call with these fields, of several that of this number."""
    calls = [event for event in events if event["is"] == "call" and asked.items() <= event.items()]
    return find(events, **{"is": "end", "id": calls[number]["id"]})


def of(events: Events, end: dict[str, Any], what: str) -> Events:
    return [event for event in events if event.get("id") == end["id"] and event["is"] == what]


def change(what: str, number: int = 0, /, **asked: object) -> Callable[..., Callable[[Events], None]]:
    """Return what changes an event of a call: its fields, or with None takes them away."""

    def with_fields(at: int = 0, **fields: object) -> Callable[[Events], None]:
        def mutate(events: Events) -> None:
            event = of(events, end_of(events, number, **asked), what)[at]
            event.update(fields)
            for name in [name for name, value in event.items() if value is None]:
                del event[name]

        return mutate

    return with_fields


def without(what: str, number: int = 0, /, at: int = 0, **asked: object) -> Callable[[Events], None]:
    return lambda events: events.remove(of(events, end_of(events, number, **asked), what)[at])


def twice(what: str, number: int = 0, /, at: int = 0, **asked: object) -> Callable[[Events], None]:
    def mutate(events: Events) -> None:
        event = of(events, end_of(events, number, **asked), what)[at]
        events.insert(events.index(event), dict(event))

    return mutate


def later(by_s: float, number: int = 0, /, **asked: object) -> Callable[[Events], None]:
    """Return what lets the history go on for some time before a call ends."""

    def mutate(events: Events) -> None:
        for event in events[events.index(end_of(events, number, **asked)) :]:
            event["at"] += by_s

    return mutate


def unhurt(*parts: str) -> Callable[[Events], None]:
    def mutate(events: Events) -> None:
        events[:] = [event for event in events if event["is"] != "hurt" or not event["part"].startswith(parts)]

    return mutate


def both(*mutations: Callable[[Events], None]) -> Callable[[Events], None]:
    def mutate(events: Events) -> None:
        for each in mutations:
            each(events)

    return mutate


def unlimited(events: Events) -> None:
    events.remove(find(events, **{"is": "limit"}))


def refused(for_s: float, times: int) -> Callable[[Events], None]:
    """Return what adds `times` answers, each followed by `for_s` seconds of hurt parts and refusals for everybody."""

    def mutate(events: Events) -> None:
        story, at = Story(), events[-1]["at"]
        for _ in range(times):
            story.ask()
            for _ in range(int(for_s / 4) + 1):
                story.tell("hurt", part="pool-0")
                story.refuse()
        for event in story.events:
            events.append({**event, "at": at + event["at"], **({"id": 1000 + event["id"]} if "id" in event else {})})

    return mutate


COMPLETION, STREAM = {"path": "/v1/completions"}, {"path": "/v1/completions", "stream": True}
BATCH, POLL, CONTENT = {"path": "/v1/batches"}, {"path": "/v1/batches/b1"}, {"path": "/v1/files/f1/content"}
OUTPUT, LIMITED = {"path": "/v1/files/out/content"}, {"key": "limited"}
without_usage = change("end", 2, **COMPLETION)(completion_tokens=0)
still_going = change("end", 3, **POLL)(state="in_progress")
PLANTED: list[tuple[str, str, Callable[[Events], None]]] = [
    ("another answer", "a piece is lost", without("piece", at=1, **STREAM)),
    ("another answer", "a piece comes twice", twice("piece", at=1, **STREAM)),
    ("another answer", "other tokens of the same text", change("piece", 2, **COMPLETION)(tokens=[1, 2, 4])),
    ("another answer", "another text of the same tokens", change("piece", 2, **COMPLETION)(text="abd")),
    ("another answer", "a stream that broke off has a gap", without("piece", 3, at=0, **COMPLETION)),
    ("another answer", "a line of a batch", change("line", **OUTPUT)(text="abd", tokens=[1, 2, 4])),
    ("another answer", "no near tie", lambda events: events.remove(find(events, **{"is": "right"}))),
    ("no end", "an answer after the bound", later(BOUND_S, **COMPLETION)),
    ("no end", "none, and others go on", both(later(BOUND_S, 5, **COMPLETION), without("end", **STREAM))),
    ("no end", "the client gave up", change("end", **STREAM)(how="late")),
    ("broken connection", "no gateway was hurt", unhurt("gateway")),
    ("no [DONE]", "a stream without it", change("end", **STREAM)(done=None)),
    ("empty answer", "no tokens", both(change("piece", 2, **COMPLETION)(text="", tokens=[]), without_usage)),
    ("wrong usage", "fewer tokens than came", change("end", **STREAM)(completion_tokens=2)),
    ("wrong usage", "more tokens than were asked for", change("end", path="/v1/responses")(completion_tokens=10)),
    ("wrong usage", "another prompt", change("end", 2, **COMPLETION)(prompt_tokens=6)),
    ("wrong finish", "none", change("piece", **STREAM)(2, finish=None)),
    ("wrong finish", "a piece follows it", change("piece", **STREAM)(1, finish="length")),
    ("wrong finish", "length before the length", change("piece", path="/v1/responses")(finish="length")),
    ("wrong finish", "neither stop nor length", change("piece", path="/v1/responses")(finish="abort")),
    ("wrong finish", "a stop that was to be ignored", change("call", 10, **COMPLETION)(ignore_eos=True)),
    ("malformed error", "a page of a proxy", change("end", 5, **COMPLETION)(well_formed=False)),
    ("no Retry-After", "a refusal", change("head", 5, **COMPLETION)(retry_after=None)),
    ("refused", "nothing was hurt", unhurt("")),
    ("refused", "a key without a limit, in calm", both(unlimited, unhurt(""))),
    ("all refused", "for more than a minute", refused(BACK_S + 4, 1)),
    ("all refused", "most of the time", refused(BACK_S / 2, 20)),
    ("error", "of the server", change("head", 5, **COMPLETION)(status=500)),
    ("error", "not found, for what was not kept", change("head", 5, **COMPLETION)(status=404)),
    ("error", "blamed, and its workers had not ended", unhurt("decode")),
    ("error", "no room, and no disk was full", unhurt("")),
    ("error", "a line whose runner had not ended", unhurt("jobs")),
    ("error", "a line that failed otherwise", change("line", path="/v1/files/err/content")(code="invalid")),
    ("lost", "a file", both(change("end", **CONTENT)(sha256=None, code="404"), change("head", **CONTENT)(status=404))),
    ("lost", "a file in the list", change("end", path="/v1/files", method="GET")(things=[])),
    ("lost", "a file that is to be deleted", change("head", path="/v1/files/f1", method="DELETE")(status=404)),
    ("lost", "a kept response", change("head", path="/v1/responses/resp1")(status=404)),
    ("lost", "the output of a batch", change("head", **OUTPUT)(status=404)),
    ("deleted, and back", "a file", change("head", 1, **CONTENT)(status=200)),
    ("deleted, and back", "a file in the list", change("end", path="/v1/files", method="GET")(things=["f1", "f2"])),
    ("changed", "a file", change("end", **CONTENT)(sha256="other")),
    ("changed", "a kept response", change("end", path="/v1/responses/resp1")(sha256="other")),
    ("batch went back", "its state", change("end", **POLL)(state="finalizing")),
    ("batch went back", "its counts", change("end", **POLL)(counts=[0, 2, 0])),
    ("batch went back", "to another end", change("end", 3, **POLL)(state="failed")),
    ("batch not completed", "it failed", change("end", 3, **POLL)(state="failed")),
    ("batch not completed", "it goes on and on", both(later(BATCH_S, 1, **POLL), unhurt(""), still_going)),
    ("batch lines", "one is missing", without("line", **OUTPUT)),
    ("batch lines", "one comes twice", twice("line", **OUTPUT)),
    ("batch lines", "its counts are others", change("end", 3, **POLL)(counts=[3, 3, 0])),
    ("over the limit", "of requests", lambda events: find(events, **{"is": "limit"}).update(requests_per_minute=0)),
    ("over the limit", "of tokens", lambda events: find(events, **{"is": "limit"}).update(tokens_per_minute=4)),
    ("unreadable", "a call ends twice", twice("end", **STREAM)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "mutate"), [pytest.param(kind, mutate, id=f"{kind}: {why}") for kind, why, mutate in PLANTED]
)
def test_a_planted_anomaly_is_named(kind: str, mutate: Callable[[Events], None]) -> None:
    mutate(events := clean())
    assert kind in kinds(events)


def test_each_kind_of_anomaly_is_planted() -> None:
    named = set(re.findall(r'Anomaly\(\s*"([^"]+)"', Path(oracle.__file__).read_text(encoding="utf-8"))) | {
        "refused",
        "error",
    }
    assert {kind for kind, *_ in PLANTED} == named


def test_an_anomaly_says_which_lines_show_it() -> None:
    change("end", **CONTENT)(sha256="other")(events := clean())
    (found,) = anomalies(History(map(json.dumps, events)))
    shown = [events[line - 1] for line in found.lines]
    assert [event["is"] for event in shown] == ["call", "end"]
    assert shown[0]["path"] == "/v1/files/f1/content"


def test_another_answer_is_shown_from_where_it_differs() -> None:
    change("piece", 2, **COMPLETION)(text="axc")(events := clean())
    (found,) = anomalies(History(map(json.dumps, events)))
    assert found.said == "to q: after 1 characters 'bc' or 'xc'"


def test_an_interrupted_history_is_no_anomaly() -> None:
    """Its clients were ended at any time, in the middle of a line."""
    written = "\n".join(map(json.dumps, clean()))
    for length in range(0, len(written), 397):
        assert anomalies(History(written[:length].splitlines())) == []


def forgetting(hurt: str) -> Events:
    """Return the history of a store that is hurt: then a file is gone, another one is there that was deleted, and a
    batch went back and is gone; a file of later stays."""
    done: dict[str, Any] = {"how": "done"}
    story = Story()
    for id in ("f1", "f2"):
        story.call("POST", "/v1/files", {**done, "thing": id}, sha256=f"sha-{id}", lines=["q"])
    story.call("POST", "/v1/batches", {**done, "thing": "b1", "state": "validating", "counts": [0, 0, 0]}, input="f1")
    story.call("GET", "/v1/batches/b1", {**done, "thing": "b1", "state": "in_progress", "counts": [1, 1, 0]})
    story.call("DELETE", "/v1/files/f2", {**done, "thing": "f2"})
    story.tell("hurt", part=hurt)
    story.call("GET", "/v1/batches/b1", {**done, "thing": "b1", "state": "in_progress", "counts": [1, 0, 0]})
    story.call("GET", "/v1/batches/b1", {**ERROR, "code": "404"}, status=404)
    story.call("POST", "/v1/batches", {**ERROR, "code": "404"}, status=404, input="f1")
    story.call("GET", "/v1/files/f1/content", {**ERROR, "code": "404"}, status=404)
    story.call("GET", "/v1/files/f2/content", {**done, "sha256": "sha-f2"})
    story.call("POST", "/v1/files", {**done, "thing": "f3"}, sha256="sha-f3")
    return story.events


def test_what_a_store_has_forgotten_is_excused_and_nothing_of_later() -> None:
    assert kinds(forgetting("redis forgets")) == set()
    assert kinds(forgetting("redis kills")) == {"lost", "deleted, and back", "batch went back", "error"}
    later = Story()
    later.events = forgetting("redis forgets")
    later.call("GET", "/v1/files/f3/content", {**ERROR, "code": "404"}, status=404)
    assert kinds(later.events) == {"lost"}
    change("end", method="GET", path="/v1/files/f2/content")(sha256="other")(others := forgetting("redis forgets"))
    assert kinds(others) == {"changed"}


def test_no_garbage_kills_it() -> None:
    """Lines are lost, doubled, cut and exchanged, and fields have any value."""
    values = [None, "", "x", -1, 0, 1.5, 1e300, float("nan"), True, [], ["x"], [1], [[]], [1, 2, 3], {}, {"at": 1}]
    for seed in range(100):
        draw, lines = Random(seed), list(map(json.dumps, clean()))
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(lines))
            event = json.loads(lines[at]) if lines[at].startswith("{") and lines[at].endswith("}") else {}
            event[draw.choice([*event, "finish", "counts"])] = draw.choice(values)
            choices = [
                json.dumps(event),
                json.dumps(event),
                lines[at][: draw.randrange(99)],
                lines[-at],
                "[" * 9999,
                "\0é",
                "null",
            ]
            lines[at : at + draw.randint(0, 2)] = [draw.choice(choices)] * draw.randint(1, 2)
        assert all(map(str, anomalies(History(lines))))


def test_the_command_prints_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events, file = clean(), tmp_path / "history.jsonl"
    file.write_text("\n".join(map(json.dumps, events)))
    assert not main([str(file)])
    assert f"{file}: no anomalies in " in capsys.readouterr().out
    unhurt("gateway")(events)
    file.write_text("\n".join(map(json.dumps, events)))
    assert main([str(file)])
    assert "broken connection: POST completions, and no gateway was hurt (lines " in capsys.readouterr().out


def test_it_shares_no_code_with_what_it_judges() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {str(name).partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_tokens_that_an_open_call_has_taken_may_come_back() -> None:
    """The first call takes a minute's six tokens. A minute later there are six again; then it ends, and used two."""
    story = Story()
    story.tell("limit", key="limited", tokens_per_minute=6)
    first = {"id": 1, "key": "limited", "method": "POST", "path": "/v1/completions", "max_tokens": 5}
    story.tell("call", **first)
    story.tell("head", id=1, status=200)
    end: dict[str, Any] = {"how": "done", "prompt_tokens": 1}
    story.call("POST", "/v1/completions", {**end, "completion_tokens": 5}, key="limited")
    story.tell("end", id=1, **end, completion_tokens=1)
    story.call("POST", "/v1/completions", {**end, "completion_tokens": 3}, key="limited")
    for event in story.events[3:]:
        event["at"] += 60
    assert kinds(story.events) == set()
    change("call", max_tokens=5)(max_tokens=0)(story.events)
    assert kinds(story.events) == {"over the limit"}
