"""A deployment of a model that chats and one that makes vectors: it starts, dies in part, and ends as one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.deployment import ANSWER_S, BACK_S, NAME, Deployment, deployed, wait_until
from tests.pooled_folders import SIZE, encoder_config, encoder_folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_folder(tmp_path_factory.mktemp("encoder"), encoder_config("bert"))


@pytest.fixture(scope="module")
def both(encoder: Path) -> Iterator[Deployment]:
    with deployed("--embed", str(encoder)) as deployment:
        yield deployment


def post(deployment: Deployment, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{deployment.url}/v1/{path}", json=body, timeout=ANSWER_S, trust_env=False)


def embedded(deployment: Deployment, encoder: Path, inputs: list[str]) -> list[list[float]]:
    answer = post(deployment, "embeddings", model=str(encoder), input=inputs)
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


def test_one_address_answers_for_both(both: Deployment, encoder: Path) -> None:
    assert f"embed: {encoder.name}, by {both.url}/v1/embeddings" in both.greeting
    rows = embedded(both, encoder, [f"w{number} w2" for number in range(40)])
    assert [len(row) for row in rows] == [SIZE] * 40
    chat = post(both, "chat/completions", model=NAME, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert chat.json()["usage"]["completion_tokens"] > 0
    assert [card["id"] for card in both.ask("/v1/models").json()["data"]] == [NAME, encoder.name]
    parts = {part["name"] for part in both.ask("/status").json()["parts"]}
    assert parts >= {"router", "router-embed", "decode-0", "decode-embed", "gateway-0", "jobs-0"}
    niceness = [os.getpriority(os.PRIO_PROCESS, both.pid(part)) for part in ("decode-0", "decode-embed")]
    assert niceness[1] - niceness[0] == 10
    metrics = both.ask("/metrics").text
    assert f'request_success_total{{class="rt",finished_reason="stop",model_name="{encoder.name}"' in metrics
    wait_until(lambda: f'model_name="{encoder.name}",worker="decode-embed"' in both.ask("/metrics").text, BACK_S)


def test_a_death_on_its_side_is_no_business_of_chats(both: Deployment, encoder: Path) -> None:
    before = embedded(both, encoder, ["w1"])
    pid = both.pid("decode-0")
    for part in ("decode-embed", "router-embed"):
        both.wound(part)
        assert post(both, "completions", model=NAME, prompt="Hi", max_tokens=2).status_code == 200
        wait_until(lambda: both.is_ready, BACK_S, both.log)
        assert embedded(both, encoder, ["w1"]) == before
    assert both.pid("decode-0") == pid


def test_what_a_batch_asks_of_it(both: Deployment, encoder: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": encoder.name, "input": "w1"}}
    file = httpx.post(
        f"{both.url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("lines.jsonl", json.dumps(line).encode())},
        trust_env=False,
    ).json()
    job = post(both, "batches", input_file_id=file["id"], endpoint="/v1/embeddings", completion_window="24h").json()
    wait_until(lambda: both.ask(f"/v1/batches/{job['id']}").json()["status"] == "completed", BACK_S, both.log)
    output = both.ask(f"/v1/batches/{job['id']}").json()["output_file_id"]
    body = both.ask(f"/v1/files/{output}/content").json()["response"]["body"]
    assert body["data"][0]["embedding"] == pytest.approx(embedded(both, encoder, ["w1"])[0], abs=1e-6)
