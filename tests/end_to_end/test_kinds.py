"""Tests that each kind of model starts as a user starts it: no flag chooses anything, and steps are measured first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.architectures.gguf.places import Kind
from tests.adapters import make_adapter
from tests.end_to_end.deployment import ANSWER_S, MODEL, NAME, Deployment, deployed
from tests.gguf_files import written
from tests.models import qwen3
from tests.pooled_folders import SIZE, encoder_config, encoder_folder, reranker_folder
from tests.rare import rarely

Flags = tuple[str, ...]


@dataclass(frozen=True)
class ModelKind:
    """A kind of model: how a test makes one, and asks it."""

    name: str
    made: Callable[[Path], Path]
    check: Callable[[Deployment], None]
    flags: Callable[[Path], Flags] = lambda _: ()


def asked(deployment: Deployment, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{deployment.url}/v1/{path}", json={"model": NAME} | body, timeout=ANSWER_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def message(deployment: Deployment, **body: Any) -> dict[str, Any]:
    """Return what a model says in a chat."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "ignore_eos": True}
    (choice,) = asked(deployment, "chat/completions", **chat | body)["choices"]
    found: dict[str, Any] = choice["message"]
    assert found["role"] == "assistant"
    return found


def chats(deployment: Deployment) -> None:
    assert message(deployment)["content"]


def embeds(deployment: Deployment) -> None:
    rows = asked(deployment, "embeddings", input=["w1 w2", "w3"])["data"]
    assert [len(row["embedding"]) for row in rows] == [SIZE, SIZE]
    assert sum(number**2 for number in rows[0]["embedding"]) == pytest.approx(1, abs=1e-5)


def ranks(deployment: Deployment) -> None:
    results = asked(deployment, "rerank", query="w1 w2", documents=["w3", "w4 w5"])["results"]
    scores = [row["relevance_score"] for row in results]
    assert scores == sorted(scores, reverse=True)
    assert {row["index"] for row in results} == {0, 1}


def adapts(deployment: Deployment) -> None:
    said = {name: message(deployment, model=name, temperature=0)["content"] for name in (NAME, "law")}
    assert said["law"] != said[NAME]


def thinks(deployment: Deployment) -> None:
    said = message(deployment, max_reasoning_tokens=6)
    assert said["reasoning"]
    assert said["content"]
    assert "</think>" not in said["reasoning"] + said["content"]


def of_demo_in_gguf(folder: Path) -> Path:
    return written(MODEL, folder / "model.gguf", "llama", lambda _: Kind.Q4_0).path


def of_a_folder(folder: Path) -> Path:
    """Save a model of another family, with the demo model's tokens."""
    qwen3(folder, vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


def of_thinking(folder: Path) -> Path:
    """Return a folder whose template lets each answer begin with thoughts."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text())
    head, answer, tail = told["chat_template"].rpartition("'<|assistant|>'")
    path.write_text(json.dumps(told | {"chat_template": f"{head}'<|assistant|><think>\\n'{tail}"}))
    assert answer
    return folder


def with_adapter(folder: Path) -> Flags:
    return "--lora", f"law={make_adapter(MODEL, folder / 'law', seed=1, scale=0.35)}"


def reranker(folder: Path) -> Path:
    return reranker_folder(folder, encoder_config("xlm-roberta", num_labels=1))


KINDS = [
    ModelKind("encoder", lambda folder: encoder_folder(folder, encoder_config("bert")), embeds),
    ModelKind("reranker", reranker, ranks),
    ModelKind("thinking", of_thinking, thinks),
    ModelKind("adapter", lambda _: MODEL, adapts, with_adapter),
    ModelKind("decoder", lambda _: Path("demo"), chats),
    ModelKind("GGUF", of_demo_in_gguf, chats),
    ModelKind("folder", of_a_folder, chats),
]
# What an encoder does in a start no other kind does. The shared deployments are decoders that measure, too.
OFTEN = ("encoder", "reranker")


@pytest.mark.parametrize("kind", [k if k.name in OFTEN else rarely(k) for k in KINDS], ids=[k.name for k in KINDS])
def test_a_kind_of_model_starts_as_a_user_starts_it(kind: ModelKind, tmp_path: Path) -> None:
    cache, model = tmp_path / "cache", kind.made(tmp_path)
    flags = ("--dtype", "auto", "--cache-directory", str(cache), *kind.flags(tmp_path))
    with deployed(*flags, model=model, measured=True) as deployment:
        assert " steps measured in " in deployment.whole_log()
        kind.check(deployment)
