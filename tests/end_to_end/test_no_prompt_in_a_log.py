"""No prompt and no output reaches a log, whatever goes wrong with its request, also at the level debug.

tests/poison looks for the prompts of requests that end, or hold up, a part.
"""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.client import command
from tests.end_to_end.deployment import ANSWER_S, NAME, Deployment, deployed, wait_until
from tests.filled import Walk
from tests.rare import rarely

MARK = "zebrafinch7431"  # in every text that a client sends
TOKENS = [1777, 1666, 1555, 1444]  # in every prompt of tokens


@pytest.fixture(scope="module", params=["debug", rarely("info")])
def logging(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    flags = ("--log-level", request.param, "--set", "server.body_limit_mb=1")
    with deployed(*flags, topology="1+1") as deployment:
        yield deployment


def shows(log: str) -> set[str]:
    """Return the lines of a log that show a text or tokens of a client."""
    coded = [base64.b64encode(MARK.encode()[at:]).decode()[:-4] for at in range(3)]
    found = re.compile("|".join([MARK, *map(re.escape, coded), r"1777\D{1,6}1666\D{1,6}1555"]))
    return {line[:400] for line in log.splitlines() if found.search(line)}


def marked(value: Any) -> Any:
    """Return a body whose texts, but those of a kind or a name of a model, have the mark."""
    match value:
        case dict():
            return {name: held if name in ("model", "type", "role") else marked(held) for name, held in value.items()}
        case [int(), *_]:
            return TOKENS * 20
        case list():
            return [marked(held) for held in value]
        case str():
            return f"{MARK} {value}"
    return value


def bodies(each: int) -> Iterator[tuple[str, Any]]:
    """Yield a body for each field that can be long, or one of `each` of them, with the mark in every text: some are
    answered, most are wrong."""
    walk = Walk(2048)
    for place in walk.places()[::each]:
        more = {"max_tokens": 3} if walk.has(place.path, "max_tokens") else {}
        yield place.path, {**marked(place.make(300)), **more}


WRONG: list[tuple[str, Any]] = [
    ("/v1/completions", {"model": NAME, "prompt": MARK, MARK: MARK}),
    ("/v1/completions", {"model": MARK, "prompt": MARK}),
    ("/v1/completions", {"model": NAME, "prompt": {MARK: MARK}}),
    ("/v1/completions", {"model": NAME, "prompt": MARK, "temperature": MARK}),
    ("/v1/completions", {"model": NAME, "prompt": f"{MARK} " * 3000}),
    ("/v1/completions", {"model": NAME, "prompt": [*TOKENS, 10**9]}),
    ("/v1/completions", {"model": NAME, "prompt": TOKENS * 2000}),
    ("/v1/completions", {"model": NAME, "prompt": MARK, "guided_regex": f"({MARK}"}),
    ("/v1/completions", {"model": NAME, "prompt": MARK, "guided_grammar": MARK}),
    ("/v1/completions", {"model": NAME, "prompt": MARK, "guided_json": f"{MARK}"}),
    ("/v1/completions", {"model": NAME, "prompt": MARK, "guided_json": {"$ref": f"#/{MARK}"}}),
    ("/v1/completions", {"model": NAME, "prompt": MARK, "guided_regex": f"{MARK}(a{{1000}}){{1000}}"}),
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": MARK, "content": MARK}]}),
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": [{"type": MARK}]}]}),
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "tool", "content": MARK, "tool_call_id": MARK}]}),
    ("/v1/responses", {"model": NAME, "input": MARK, "previous_response_id": MARK}),
    ("/v1/messages", {"model": NAME, "max_tokens": 0, "messages": [{"role": "user", "content": MARK}]}),
    ("/v1/completions", {"model": NAME, "prompt": MARK, "max_tokens": 3, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"model": NAME, "prompt": [MARK, MARK], "n": 2, "max_tokens": 3, "stop": [MARK]}),
    ("/v1/embeddings", {"model": NAME, "input": MARK}),
    ("/v1/score", {"model": NAME, "queries": MARK, "documents": MARK}),
]


@pytest.mark.parametrize("each", [12, rarely(1)])
def test_whatever_is_asked(logging: Deployment, each: int) -> None:
    asked = [*WRONG, *bodies(each)]
    before = len(logging.whole_log())

    def ask(one: tuple[str, Any]) -> int:
        return httpx.post(f"{logging.url}{one[0]}", json=one[1], timeout=ANSWER_S).status_code

    with ThreadPoolExecutor(4) as pool:
        statuses = [*pool.map(ask, asked)]
    assert {200, 400, 404} <= {*statuses} <= {200, 400, 404, 413, 429}
    for raw in (f'{{"model": "{MARK}', f'["{MARK}"]', f'{{"prompt": "{MARK}\\ud800"}}', f"{MARK} " * 200_000):
        httpx.post(f"{logging.url}/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    for path in (f"/v1/models/{MARK}", f"/v1/requests/{MARK}/timeline", f"/v1/files/{MARK}", f"/{MARK}"):
        httpx.get(f"{logging.url}{path}", params={"q": MARK}, headers={"x-request-id": f"the {MARK}", MARK: MARK})
    wait_until(lambda: logging.whole_log().count("answered") > len(asked) // 2, ANSWER_S, logging.log)
    assert shows(logging.whole_log()[before:]) == set()


def test_a_client_that_leaves_and_parts_that_die(logging: Deployment) -> None:
    before = len(logging.whole_log())
    body = {"model": NAME, "prompt": f"{MARK} {MARK}", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    for length in (len(raw), len(raw) + 10):  # amid its answer, and amid its body
        with socket.create_connection(("127.0.0.1", logging.port)) as client:
            client.sendall(head + f"Content-Length: {length}\r\n\r\n".encode() + raw)
            if length == len(raw):
                assert client.recv(12)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(httpx.post, f"{logging.url}/v1/completions", json={**body, "prompt": prompt}, timeout=ANSWER_S)
            for prompt in (MARK, TOKENS * 100, [MARK, MARK], TOKENS)
        ]
        wait_until(lambda: logging.metric("num_requests_running") >= 3, ANSWER_S, logging.log)
        for part in ("decode-0", "router", "prefill-0"):
            logging.wound(part)
        assert {answer.result().status_code for answer in asked} <= {200, 503}
    wait_until(lambda: logging.is_ready, ANSWER_S, logging.log)
    assert shows(logging.whole_log()[before:]) == set()


def test_lines_of_a_batch(logging: Deployment, tmp_path: Path) -> None:
    before, file = len(logging.whole_log()), tmp_path / f"{MARK}.jsonl"
    good = [
        {"custom_id": f"{MARK}{number}", "method": "POST", "url": path, "body": body}
        for number, (path, body) in enumerate([*WRONG, *bodies(4)])
        if path == "/v1/completions" and body["model"] == NAME
    ]
    lines = [json.dumps(line) for line in good]
    for bad in ([f'{{"custom_id": "{MARK}'], [MARK, MARK]):
        file.write_text("\n".join([*lines, *bad]))
        command("batch", "submit", file, "--url", f"{logging.url}/v1", "--endpoint", "/v1/completions", "--wait")
    file.write_text("\n".join(lines))
    submitted = command(
        "batch", "submit", file, "--url", f"{logging.url}/v1", "--endpoint", "/v1/completions", "--wait"
    )
    assert "lines failed" in submitted.stderr, "some are wrong"
    assert shows(logging.whole_log()[before:]) == set()
