"""A client of batches that goes on while parts are away."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx

from tests.end_to_end.client import Wanted
from tests.end_to_end.deployment import BACK_S, Deployment

ENDED = ("completed", "failed", "expired", "cancelled")


def _as_line(number: int, wanted: Wanted) -> str:
    body = {name: value for name, value in wanted.body.items() if name != "stream"}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})


class Patient:
    """A client that repeats its requests while the gateway is away."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        deadline = time.monotonic() + BACK_S
        while True:
            with suppress(httpx.TransportError):
                answer = httpx.request(method, f"{self._deployment.url}{path}", timeout=60, **given)
                if answer.status_code < 500:
                    assert answer.status_code == 200, answer.text
                    return answer
            assert time.monotonic() < deadline, self._deployment.log()
            time.sleep(0.05)

    def submit(self, wanted: Sequence[Wanted]) -> str:
        data = "\n".join(_as_line(number, request) for number, request in enumerate(wanted)).encode()
        files, purpose = {"file": ("x.jsonl", data)}, {"purpose": "batch"}
        file = self.ask("POST", "/v1/files", files=files, data=purpose).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "7d"}
        return str(self.ask("POST", "/v1/batches", json=asked).json()["id"])

    def look(self, id: str) -> Any:
        return self.ask("GET", f"/v1/batches/{id}").json()

    def rows(self, batch: Any) -> list[Any]:
        """Return the lines of a batch's results."""
        return [
            json.loads(row) for row in self.ask("GET", f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        ]
