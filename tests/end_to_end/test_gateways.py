"""Tests of several gateways behind one address, with keys and a collector of traces: they share limits, and a gateway
that dies harms no other client."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.gateway.access.keys import Limits, Scope, make_key
from tests.end_to_end.client import command
from tests.end_to_end.deployment import ANSWER_S, BACK_S, Deployment, deployed, wait_until
from tests.tracing.receiver import Receiver, receiving

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 5."}], "max_tokens": 8}
BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
ENDS_S = 4.0  # keys are looked at each second; the machine may be slow


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    return path, make_key(path, "ann", Scope, Limits()), make_key(path, "bob", Scope, Limits(requests_per_minute=12))


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def two(keys: tuple[Path, str, str], receiver: Receiver) -> Iterator[Deployment]:
    flags = ("--gateways", "2", "--keys-file", str(keys[0]), "--otlp-endpoint", receiver.url)
    with deployed(*flags) as deployment:
        yield deployment


def statuses(deployment: Deployment, key: str, count: int) -> list[int]:
    """Return the status of each request; each has its own connection, which the kernel gives to either gateway."""
    return [complete(deployment, key).status_code for _ in range(count)]


def complete(deployment: Deployment, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{deployment.url}/v1/completions", json=BODY, headers=headers, timeout=ANSWER_S)


def streamed(deployment: Deployment, key: str) -> tuple[Any, str]:
    """Return the last two events of an answer that would take long."""
    body = {**BODY, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{deployment.url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
    *_, last, done = re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)
    return json.loads(last), done


def answered(deployment: Deployment) -> set[str]:
    lines = [line for line in deployment.whole_log().splitlines() if "path=/v1/completions status=200" in line]
    return {name for name in ("gateway-0", "gateway-1") if any(f" {name}: " in line for line in lines)}


def test_both_serve_and_either_tells_of_both(two: Deployment, keys: tuple[Path, str, str]) -> None:
    asked = 0

    def both() -> bool:
        nonlocal asked
        assert statuses(two, keys[1], 4) == [200] * 4, "a gateway listens once it knows workers"
        asked += 4
        return answered(two) == {"gateway-0", "gateway-1"}

    wait_until(both, BACK_S, two.log)
    wait_until(lambda: two.metric("request_success_total", keys[1]) == asked, BACK_S)
    assert [two.metric("request_success_total", keys[1]) for _ in range(6)] == [asked] * 6


def test_no_other_user_may_listen_or_ask_between_them(two: Deployment) -> None:
    sockets = two.unix_sockets()
    # Two of each gateway and of the job runner, for metrics and the live page; another of each gateway for the one that
    # replaces it; three of the launcher; six parts' inboxes.
    assert len(sockets) == 17
    for name in sockets:
        folder = Path(name).parent.stat()
        assert folder.st_uid == os.getuid()
        assert stat.S_IMODE(folder.st_mode) == 0o700


def test_limits_hold_over_both(two: Deployment, keys: tuple[Path, str, str]) -> None:
    began_at = time.monotonic()
    answers = [complete(two, keys[2]) for _ in range(24)]
    came_back = math.ceil((time.monotonic() - began_at) / 60 * 12)
    assert [answer.status_code for answer in answers[:12]] == [200] * 12
    refusals = [answer for answer in answers if answer.status_code == 429]
    assert 12 - came_back <= len(refusals) <= 12
    refused = refusals[0]
    assert refused.headers["x-ratelimit-limit-requests"] == "12"
    assert int(refused.headers["retry-after"]) >= 1
    assert statuses(two, keys[1], 1) == [200]


def test_a_key_that_leaves_the_file_is_refused_by_both_and_one_that_comes_is_taken(
    two: Deployment, keys: tuple[Path, str, str]
) -> None:
    cat = make_key(keys[0], "cat", Scope, Limits())
    wait_until(lambda: statuses(two, cat, 8) == [200] * 8, BACK_S, two.log)
    whole = keys[0].read_text()
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(streamed, two, cat) for _ in range(8)]
        wait_until(lambda: two.metric("num_requests_running", keys[1]) >= 8, BACK_S, two.log)
        keys[0].write_text(whole.partition("  - name: cat")[0])
        began_at = time.monotonic()
        events = [stream.result() for stream in streams]
        assert time.monotonic() - began_at < ENDS_S
    assert [(last["error"]["code"], done) for last, done in events] == [("key_revoked", "[DONE]")] * len(events)
    wait_until(lambda: statuses(two, cat, 8) == [401] * 8, BACK_S, two.log)
    assert statuses(two, keys[1], 4) == [200] * 4


def test_either_explains_a_request(two: Deployment, keys: tuple[Path, str, str]) -> None:
    name = complete(two, keys[1]).headers["x-request-id"]
    headers = {"Authorization": f"Bearer {keys[1]}"}
    asked = [httpx.get(f"{two.url}/v1/requests/{name}/timeline", headers=headers, timeout=ANSWER_S) for _ in range(8)]
    assert {answer.status_code for answer in asked} == {200}


def test_chats_and_lines_of_batches_are_traced(
    two: Deployment, keys: tuple[Path, str, str], receiver: Receiver, tmp_path: Path
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line))
    headers = {"Authorization": f"Bearer {keys[1]}"}
    httpx.post(f"{two.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=ANSWER_S).raise_for_status()
    submitted = command("batch", "submit", file, "--url", f"{two.url}/v1", "--api-key", keys[1], "--wait")
    assert submitted.returncode == 0, submitted.stderr
    wait_until(lambda: receiver.classes() == {"rt", "be"}, ANSWER_S)
    assert set(receiver.spans()) == {"llm_request", "queue", "prefill", "decode"}


def test_a_gateway_goes_on_while_the_other_is_gone(two: Deployment, keys: tuple[Path, str, str]) -> None:
    two.wound("gateway-0")
    assert statuses(two, keys[1], 8) == [200] * 8
    assert two.ask("/v1/models").status_code == 401


def test_no_key_is_in_the_log_or_in_a_process(two: Deployment, keys: tuple[Path, str, str]) -> None:
    assert complete(two, keys[1]).status_code == 200
    assert not any(key in two.whole_log() for key in keys[1:])
