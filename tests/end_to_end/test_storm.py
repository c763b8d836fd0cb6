"""A storm of requests that are refused or abandoned, each of which would write a line to the log of a gateway."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from alignedserve.gateway.access.keys import Limits, Scope, make_key
from alignedserve.shell.logs import BURST, LINES_A_SECOND
from tests.end_to_end.client import Wanted, check_greedy, client, mixed, tokens_of
from tests.end_to_end.deployment import ANSWER_S, NAME, deployed
from tests.rare import rare

NUM_REQUESTS, AT_ONCE = 10_000, 100
PATIENT = 50  # each such request waits for its answer, the others hang up: a gateway holds back answers to floods
BODY = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 3}
MOST_KINDS = 8  # of lines: a kind has its place in the code, its caller and its status
MOST_LINE_BYTES = 1_000


def sent(number: int, ann: str, bob: str) -> tuple[int, bytes]:
    """Return the status that a request of the storm has to get, or 0 where it need not get any, and its bytes."""
    wrong: list[tuple[int, bytes]] = [
        (400, _post(ann, b'{"model": ')),
        (400, _post(ann, json.dumps(BODY | {"max_tokens": f"number {number}"}))),
        (400, _post(ann, json.dumps(BODY | {"temperature": 10**9}))),
        (404, _post(ann, json.dumps(BODY | {"model": f"other-{number}"}))),
        (404, _post(ann, "", f"/v1/no/{number}/{'x' * 10_000}")),
        (429, _post(bob, json.dumps(BODY))),
        (0, _post(ann, json.dumps(BODY | {"max_tokens": 300, "stream": True}))),
        (0, _post(ann, json.dumps(BODY))[: -number % 40 - 1]),
        (0, f"{number}\0 is no HTTP\r\n\r\n".encode()),
    ]
    if number % 5 < 3:
        return 401, _post(f"as-none-{number}", json.dumps(BODY))
    return wrong[number // 5 % len(wrong)]


def _post(key: str, body: bytes | str, path: str = "/v1/completions") -> bytes:
    body = body if isinstance(body, bytes) else body.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


async def ask(port: int, data: bytes, is_patient: bool) -> int:
    """Send a request, and return the status of its answer if it waits for one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        if not is_patient:
            return 0
        return int((await asyncio.wait_for(reader.readline(), ANSWER_S)).split()[1])
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@rare  # tests/shell has the limits of the log: this takes half a minute
def test_ten_thousand_wrong_requests_write_few_lines_and_the_next_ones_are_answered(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    ann, bob = make_key(keys, "ann", Scope, Limits()), make_key(keys, "bob", Scope, Limits(requests_per_minute=1))

    async def storm(port: int) -> int:
        numbers, asked_of_none = iter(range(NUM_REQUESTS)), 0

        async def send_on() -> None:
            nonlocal asked_of_none
            for number in numbers:
                status, data = sent(number, ann, bob)
                is_patient = bool(status) and number % PATIENT == 0
                got = await ask(port, data, is_patient)
                assert not is_patient or got == status, (number, got, data[:200])
                asked_of_none += status == 401

        await ask(port, _post(bob, json.dumps(BODY)), is_patient=True)  # its request of this minute
        await asyncio.gather(*(send_on() for _ in range(AT_ONCE)))
        await asyncio.sleep(1.0)  # another line of each kind may come now
        assert await ask(port, _post("as-last", ""), is_patient=True) == 401
        return asked_of_none + 1

    with deployed("--keys-file", str(keys)) as deployment:
        before, began_at = len(deployment.whole_log()), time.monotonic()
        num_without_key = asyncio.run(storm(deployment.port))
        duration_s = time.monotonic() - began_at
        lines = deployment.whole_log()[before:].splitlines()
        kinds = Counter(map(_kind, lines))
        print(f"{len(lines)} lines in {duration_s:.0f} s, of each kind {sorted(kinds.values())}")
        assert len(kinds) <= MOST_KINDS, kinds
        assert max(kinds.values()) <= BURST + LINES_A_SECOND * duration_s + 1, kinds
        assert max(map(len, lines)) <= MOST_LINE_BYTES
        without_key = [line for line in lines if " status=401 " in line]
        left_out = sum(int(found) for line in without_key for found in re.findall("left_out=([0-9]+)", line))
        assert left_out > 0
        assert len(without_key) + left_out == num_without_key
        wanted = mixed(4, seed=5, outputs=(1, 60))
        check_greedy(wanted, asyncio.run(_tokens(deployment.url, wanted, {"Authorization": f"Bearer {ann}"})))


def _kind(line: str) -> str:
    """Return a line without its time, its reason and the values that differ between lines of a kind."""
    line = re.sub(r' error=("[^"]*"|\S+)', "", line)
    return re.sub(r"^[-0-9]+ [0-9:,]+ | (request_id|path|duration_s|code|lines_\w+|\w+_tokens|ttft_s)=\S+", "", line)


async def _tokens(url: str, wanted: list[Wanted], headers: Mapping[str, str]) -> list[Any]:
    async with client(url) as http:
        http.headers.update(headers)
        return await asyncio.gather(*(tokens_of(http, request) for request in wanted))
