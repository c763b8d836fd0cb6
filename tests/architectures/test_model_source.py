"""Tests that a model's name leads to its folder, or to one line that says why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from alignedserve.architectures import model_source
from alignedserve.architectures.model_source import (
    DEMO_FOLDER,
    at_revision_of,
    fetched_bytes,
    is_hub_id,
    leads_to,
    name_of,
    resolve,
    without_revision,
)
from alignedserve.errors import ModelError
from alignedserve.text.text_model import TextModel

ROOT = Path(__file__).resolve().parents[2]


def _hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[dict[str, Any]]:
    """Stand in for the hub's client, and record what it was asked."""
    asked: list[dict[str, Any]] = []

    def download(model: str, **options: Any) -> str:
        asked.append({"model": model, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_the_demo_model_is_part_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(model_source, "DEMO_FOLDER", tmp_path)
    assert resolve("demo") == tmp_path


def test_a_package_without_the_demo_model_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_source, "DEMO_FOLDER", tmp_path)
    with pytest.raises(ModelError, match="demo model is missing"):
        resolve("demo")


def test_a_folder_is_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("org/name") == Path("org/name")
    assert resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "name", ["/none/here", "./none", "../none", "~/none", "a/b/c", "gpt2", "org/", "/x", "org/na me"]
)
def test_what_is_neither_folder_nor_hub_id(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = _hub(monkeypatch, AssertionError("not to be asked"))
    with pytest.raises(ModelError, match="neither a folder nor a hub id"):
        resolve(name)
    assert asked == []


def test_another_file_is_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "weights.bin").touch()
    (tmp_path / "org" / "weights.gguf").write_text("something else")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="neither a folder"):
        resolve("org/weights.bin")
    with pytest.raises(ModelError, match=r"org/weights\.gguf is no GGUF file"):
        resolve("org/weights.gguf")


def test_a_hub_id_is_fetched_without_other_formats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = _hub(monkeypatch, tmp_path)
    assert resolve("org/name-7b.v2") == tmp_path
    [request] = asked
    wanted = ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "a.jinja"]
    unwanted = ["pytorch_model.bin", "a.gguf", "a.pth", "original/model.safetensors", "README.md", "a.py"]
    filters = {name: request[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*wanted, *unwanted], **filters)) == wanted


def test_every_node_fetches_the_commit_that_the_launcher_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = _hub(monkeypatch, tmp_path / "snapshots" / "0a1b2c")
    for model in ("org/name", "org/name@main", "org/name@refs/pr/7"):
        exact = at_revision_of(model, resolve(model))
        assert (exact, without_revision(exact)) == ("org/name@0a1b2c", "org/name")
        resolve(exact)
    assert [request["model"] for request in asked] == ["org/name"] * 6
    assert [request["revision"] for request in asked] == [None, "0a1b2c", "main", "0a1b2c", "refs/pr/7", "0a1b2c"]
    assert at_revision_of(str(tmp_path), tmp_path) == without_revision(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("org/name@main", "org/name"),
        ("/models/qwen-0.5b-q4_k_m.gguf", "qwen-0.5b-q4_k_m"),
        ("/models/big-00001-of-00003.gguf", "big"),
        ("models/llama.v2/", "llama.v2"),
        ("./llama", "llama"),
        ("~/llama", "llama"),
        ("/models/a,b*c", "a-b-c"),
        ("/", "model"),
    ],
)
def test_a_models_name_tells_nobody_where_it_lies(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama.v2").mkdir(parents=True)
    assert name_of(model) == name
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert name_of(".") == "here"


def test_a_request_leads_to_the_model_by_its_names_and_by_paths_that_end_so() -> None:
    names = ("qwen", "org/other", "claude-*")
    right = ("qwen", "org/other", "claude-sonnet-4", "/any/where/qwen", "./qwen/", "qwen.gguf", "models/qwen.gguf")
    wrong = ("", "Qwen", "org/qwen", "other", "clau", "a claude-x", "/qwen/x", "*", "qwe?", "qwen/..")
    assert [asked for asked in (*right, *wrong) if leads_to(asked, names)] == [*right]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (LocalEntryNotFoundError("long\nexplanation"), "HF_HUB_OFFLINE is set, and it was not fetched before"),
        (HFValidationError("x"), "cannot be a hub id"),
        (OSError("disk\nfull"), "OSError: disk full"),
    ],
)
def test_a_fetch_that_fails_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    _hub(monkeypatch, error)
    with pytest.raises(ModelError, match=why) as raised:
        resolve("org/name")
    assert "\n" not in str(raised.value)
    assert "org/name" in str(raised.value)


def test_offline_the_real_client_is_refused_in_one_line(tmp_path: Path) -> None:
    code = "from alignedserve.architectures.model_source import resolve; resolve('org/name')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    beginning = (
        "alignedserve.errors.ModelError: org/name is not a local folder and cannot be fetched: HF_HUB_OFFLINE is set"
    )
    assert last.startswith(beginning)


# --- Without weights


def test_without_weights_those_of_the_hub_are_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    asked = _hub(monkeypatch, tmp_path)
    assert resolve("org/name", with_weights=False) == tmp_path
    files = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    found = [*filter_repo_objects(files, allow_patterns=asked[0]["allow_patterns"])]
    assert found == ["config.json", "tokenizer.json", "model.safetensors.index.json"]


def test_without_weights_a_folder_needs_no_tokenizer(tmp_path: Path) -> None:
    folder, cache = tmp_path / "big", str(tmp_path / "cache")
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 5000, "eos_token_id": 4999}')
    made = resolve(str(folder), cache, with_weights=False)
    assert (made, 1) == (resolve(str(folder), cache, with_weights=False), len([*made.parent.iterdir()]))
    ours, demo = (TextModel.load(path) for path in (made, DEMO_FOLDER))
    text = "Count from 3 to #12. #4998"
    assert ours.prompt_ids(text) == demo.prompt_ids(text)
    assert (ours.vocab_size, ours.eos_ids) == (5000, (4999,))
    assert [ours.tokenizer.decode([number]) for number in (2048, 4999)] == [" #2048", " #4999"]
    assert resolve(str(made), cache, with_weights=False) == made, "it has a tokenizer now"


def test_a_vocabulary_that_is_smaller_than_the_demo_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 97}')
    with pytest.raises(ModelError, match=r"does not fit its vocabulary of 97: put a tokenizer\.json there"):
        resolve(str(tmp_path), str(tmp_path / "cache"), with_weights=False)


def test_what_is_fetched_of_a_model_counts_what_is_not_whole_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fetched_bytes("org/name") == 0
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "whole").write_bytes(b"x" * 100)
    (blobs / "coming.incomplete").write_bytes(b"x" * 20)
    assert fetched_bytes("org/name") == 120


def test_a_folder_is_no_hub_id_even_if_it_has_the_form_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name")
    assert not is_hub_id("demo")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("qwen2.5-coder:1.5b-instruct-q4_K_M", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
        ("qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("llama3.2", "meta-llama/Llama-3.2-3B-Instruct"),
        ("Llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ("gemma3:270m", "google/gemma-3-270m-it"),
        ("mistral:latest", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("phi4:14b", "microsoft/phi-4"),
    ],
)
def test_a_name_as_in_ollama_leads_to_the_hub(name: str, meant: str) -> None:
    with pytest.raises(ModelError, match=f": did you mean {re.escape(meant)}\\?$"):
        resolve(name)
    assert is_hub_id(meant)
