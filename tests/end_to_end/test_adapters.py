"""Tests of adapters (LoRA) on whole deployments: each request says what PEFT says with its own adapter, also after a
worker was killed, with an adapter that was loaded while it runs, and in a batch job."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import make_adapter, with_adapter
from tests.conftest import SOAK
from tests.end_to_end.client import command, held_out
from tests.end_to_end.deployment import ANSWER_S, BACK_S, MODEL, NAME, TOPOLOGIES, Deployment, deployed, wait_until
from tests.reference import Tally, compare, load

TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    above = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(MODEL, above / name, seed=seed, scale=0.35) for seed, name in enumerate(("sql", "law"))}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Any]:
    return {NAME: load(MODEL)} | {name: with_adapter(MODEL, folder) for name, folder in folders.items()}


def ask(deployment: Deployment, model: str, prompt: tuple[int, ...]) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{deployment.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def check(deployment: Deployment, names: list[str], references: dict[str, Any], seed: int) -> None:
    """Send the same prompts to each model at once, so that KV of one would be found for another, and compare."""
    prompts = [held_out()[at : at + 150] for at in range(seed, seed + 600, 300)]
    asked = [(name, prompt) for prompt in prompts for name in names * 2]
    with ThreadPoolExecutor(len(asked)) as pool:
        said = [*pool.map(lambda one: ask(deployment, *one), asked)]
    tally = Tally()
    for (name, prompt), tokens in zip(asked, said, strict=True):
        compare(references[name], prompt, tokens, tally, name)
    tally.check()
    assert len({tuple(tokens) for tokens in said[: len(names)]}) == len(names), "each model says something else"


def post(deployment: Deployment, path: str, **body: str) -> httpx.Response:
    return httpx.post(f"{deployment.url}/v1/{path}", json=body, timeout=ANSWER_S)


@pytest.mark.parametrize("topology", TOPOLOGIES if SOAK else TOPOLOGIES[1:])
def test_adapters_say_what_peft_says(
    topology: str, folders: dict[str, Path], references: dict[str, Any], tmp_path: Path
) -> None:
    with deployed("--lora", f"sql={folders['sql']}", "--gateways", "2", topology=topology) as deployment:
        check(deployment, [NAME, "sql"], references, seed=0)
        empty = folders["sql"].parent / "empty"
        empty.mkdir(exist_ok=True)
        for path, why in ((empty, "adapter_config.json"), (tmp_path, "does not lie below")):
            refused = post(deployment, "load_lora_adapter", lora_name="law", lora_path=str(path))
            assert refused.status_code == 400
            assert why in refused.json()["error"]["message"]
        loaded = post(deployment, "load_lora_adapter", lora_name="law", lora_path=str(folders["law"]))
        assert loaded.status_code == 200, loaded.text
        for _ in range(6):  # the kernel chooses the gateway of each connection
            cards = deployment.ask("/v1/models").json()["data"]
            assert [(card["id"], card.get("parent")) for card in cards] == [(NAME, None), ("sql", NAME), ("law", NAME)]
        check(deployment, [NAME, "sql", "law"], references, seed=0)
        deployment.wound("decode-0")
        wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
        check(deployment, [NAME, "sql", "law"], references, seed=1000)
        _check_batch(deployment, tmp_path)
        assert post(deployment, "unload_lora_adapter", lora_name="law").status_code == 200
        assert post(deployment, "unload_lora_adapter", lora_name="law").status_code == 404
        body = {"model": "law", "prompt": "Hi", "max_tokens": 1}
        gone = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=ANSWER_S)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert deployment.stop(signal.SIGINT) == 0
        deployment.check_nothing_is_left()


def _check_batch(deployment: Deployment, tmp_path: Path) -> None:
    """Run a job whose lines choose different models, and one that no model has."""
    prompt = held_out()[40:90]

    def line(name: str) -> str:
        body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})

    lines, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    lines.write_text("\n".join(map(line, (NAME, "sql", "law"))) + "\n")
    done = command("batch", "submit", lines, "--url", f"{deployment.url}/v1", "--wait", "--out", out)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    said = {row["custom_id"]: row["response"]["body"]["choices"][0]["token_ids"] for row in rows}
    assert said == {name: ask(deployment, name, prompt) for name in (NAME, "sql", "law")}
