"""Tests of adapters (LoRA) at the gateway: which names it serves, who may load them, and what is refused in a line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from alignedserve.architectures.families.lora import CONFIG, WEIGHTS, LoraFiles, read_lora
from alignedserve.architectures.families.model_config import read_config
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Scope, hash_key
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway
from tests.models import gqa

ROOM = 1 << 20
ROOTS = (Path(tempfile.gettempdir()),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gqa(tmp_path_factory.mktemp("models") / "gqa")


def written(folder: Path, rank: int = 4) -> Path:
    folder.mkdir(parents=True)
    shapes = {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.mlp.down_proj": (32, 56)}
    tensors: dict[str, torch.Tensor] = {}
    for layer, (outputs, inputs) in shapes.items():
        a, b = LoraFiles.tensor_names(layer)
        tensors |= {a: torch.ones(rank, inputs), b: torch.ones(outputs, rank)}
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def adapters_of(model: Path, path: Path | None = None, room: int = ROOM, roots: tuple[Path, ...] = ROOTS) -> Adapters:
    return Adapters(path, read_config(model), "float32", room, roots)


@pytest.fixture
def gateway(text: TextModel, model: Path) -> Gateway:
    return Gateway(text, FakeOwner((5,), (2,)), adapters=adapters_of(model))


def load(gateway: Gateway, name: str, folder: Path | str, **given: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder)}
    return gateway.ask("POST", "/v1/load_lora_adapter", json=body, **given)


def unload(gateway: Gateway, name: str) -> httpx.Response:
    return gateway.ask("POST", "/v1/unload_lora_adapter", json={"lora_name": name})


def test_requests_choose_an_adapter_by_its_name(gateway: Gateway, model: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "sql")
    assert gateway.complete(model="sql").status_code == 404
    loaded = load(gateway, "sql", folder)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert gateway.complete(model="sql").status_code == 200
    assert gateway.complete().status_code == 200
    chosen = [request.adapter for request in gateway.owner.opened]
    assert chosen[0] is not None
    assert (chosen[0].name, chosen[0].folder) == ("sql", str(folder))
    assert chosen[0].id == read_lora(folder, read_config(model)).id
    assert chosen[1] is None
    assert len({request.kv_salt for request in gateway.owner.opened}) == 2
    assert unload(gateway, "sql").status_code == 200
    assert gateway.complete(model="sql").json()["error"]["code"] == "model_not_found"
    assert unload(gateway, "sql").status_code == 404


def test_messages_and_responses_choose_it_too(gateway: Gateway, tmp_path: Path) -> None:
    load(gateway, "sql", written(tmp_path / "sql"))
    message = {"model": "sql", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
    assert gateway.ask("POST", "/v1/messages", json=message).json()["model"] == "sql"
    answer = gateway.ask("POST", "/v1/responses", json={"model": "sql", "input": "Hi", "store": False})
    assert answer.status_code == 200
    assert [request.adapter and request.adapter.name for request in gateway.owner.opened] == ["sql", "sql"]


def test_the_list_of_models_names_the_parent(gateway: Gateway, tmp_path: Path) -> None:
    folder = written(tmp_path / "sql")
    load(gateway, "org/sql", folder)
    cards = gateway.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["demo", "org/sql"]
    assert cards[1] == gateway.get("/v1/models/org/sql").json()
    assert (cards[1]["parent"], cards[1]["root"]) == ("demo", str(folder))
    assert cards[0].keys() < cards[1].keys()


def test_only_who_may_load_adapters_is_told_their_folders(text: TextModel, model: Path, tmp_path: Path) -> None:
    adapters = adapters_of(model)
    adapters.load("sql", str(written(tmp_path / "sql")), ("demo",))
    both = frozenset({Scope.GENERATE, Scope.ADAPTERS})
    ring = KeyRing([KeyEntry("ann", hash_key("ann"), both), KeyEntry("bob", hash_key("bob"))])
    with_keys = Gateway(text, FakeOwner(), keys=ring, adapters=adapters)
    alone, exposed = (Gateway(text, FakeOwner(), adapters=adapters, is_exposed=so) for so in (False, True))
    for gateway, key, sees in (
        (with_keys, "ann", True),
        (with_keys, "bob", False),
        (alone, "", True),
        (exposed, "", False),
    ):
        head = {"Authorization": f"Bearer {key}"} if key else {}
        card = gateway.get("/v1/models/sql", headers=head).json()
        assert card == gateway.get("/v1/models", headers=head).json()["data"][1]
        assert ("root" in card, card["parent"]) == (sees, "demo")


def test_more_adapters_than_gateways_can_share_are_refused(
    text: TextModel, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.access.adapters._SIZE", len(str(tmp_path)) + 120)
    gateway = Gateway(text, FakeOwner((2,)), adapters=adapters_of(model))
    folder = written(tmp_path / "sql")
    assert load(gateway, "sql", folder).status_code == 200
    refused = load(gateway, "sql2", folder)
    assert (refused.status_code, "too many adapters are loaded" in refused.text) == (400, True)
    assert unload(gateway, "sql").status_code == load(gateway, "sql2", folder).status_code == 200


def test_what_cannot_be_loaded_is_refused_in_a_line(gateway: Gateway, tmp_path: Path) -> None:
    sound = written(tmp_path / "sound")
    load(gateway, "taken", sound)
    large = written(tmp_path / "large", rank=256)
    refusals = {
        ("sql", str(tmp_path / "nowhere")): "is not a folder",
        ("sql", "relative/path"): "must be an absolute path",
        ("sql", "/nul\0byte"): "must be an absolute path",
        ("", str(sound)): "must be a text",
        ("x" * 201, str(sound)): "must be a text",
        ("demo", str(sound)): "the model itself is called 'demo'",
        ("taken", str(sound)): "is loaded already",
        ("sql", str(written(tmp_path / "huge", rank=257))): "is above 256",
    }
    for (name, folder), said in refusals.items():
        refused = load(gateway, name, folder)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_lora")
        assert said in error["message"]
        assert "\n" not in error["message"]
    assert load(gateway, "large-1", large).status_code == 200
    full = [load(gateway, f"large-{number}", large) for number in range(2, 6)]
    assert full[-1].status_code == 400
    assert "unload another" in full[-1].json()["error"]["message"]
    assert gateway.complete(model="taken").status_code == 200


def test_what_lies_elsewhere_is_not_loaded_and_nothing_is_said_of_it(
    text: TextModel, model: Path, tmp_path: Path
) -> None:
    """An absolute path, `..`, and links of folders and of files all lead out of the root."""
    root, outside = tmp_path / "root", written(tmp_path / "outside")
    (tmp_path / "root2").mkdir()
    inside = written(root / "inside")
    (root / "link").symlink_to(outside)
    half = written(root / "half")
    (half / WEIGHTS).unlink()
    (half / WEIGHTS).symlink_to(outside / WEIGHTS)
    (root / "beside").symlink_to(inside)
    gateway = Gateway(text, FakeOwner((2,)), adapters=adapters_of(model, roots=(root,)))
    elsewhere = [outside, tmp_path / "nothing", root / ".." / "outside", root / "link", half, tmp_path / "root2", "/"]
    for folder in [*elsewhere, "/etc/passwd", "/proc/self/root", f"{root}/../root2/x", "/proc/self/fd/0"]:
        refused = load(gateway, "sql", folder)
        assert refused.status_code == 400
        assert f"does not lie below {root} " in refused.json()["error"]["message"]
    assert load(gateway, "one", root / "." / ".." / "root" / "inside").status_code == 200
    assert load(gateway, "two", root / "beside").status_code == 200
    none = Gateway(text, FakeOwner((2,)), adapters=adapters_of(model, roots=()))
    assert "start it with --set engine.adapters_root" in load(none, "sql", inside).json()["error"]["message"]


def test_a_deployment_without_memory_for_adapters_says_so(text: TextModel, tmp_path: Path) -> None:
    gateway = Gateway(text, FakeOwner((2,)))
    refused = load(gateway, "sql", written(tmp_path / "sql"))
    assert refused.status_code == 400
    assert "start it with --lora" in refused.json()["error"]["message"]


def test_only_keys_of_that_scope_load(text: TextModel, model: Path, tmp_path: Path) -> None:
    ring = KeyRing([KeyEntry("ann", hash_key("ann"), frozenset({Scope.ADAPTERS})), KeyEntry("bob", hash_key("bob"))])
    gateway = Gateway(text, FakeOwner((2,)), keys=ring, adapters=adapters_of(model))
    folder = written(tmp_path / "sql")
    refused = load(gateway, "sql", folder, headers={"Authorization": "Bearer bob"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    assert load(gateway, "sql", folder, headers={"Authorization": "Bearer ann"}).status_code == 200


def test_processes_share_what_is_loaded_and_a_new_one_knows_it(model: Path, tmp_path: Path) -> None:
    config, path = read_config(model), tmp_path / "adapters"
    first = adapters_of(model, path)
    first.begin([("sql", read_lora(written(tmp_path / "sql"), config))])
    second = adapters_of(model, path)
    second.begin([("other", read_lora(written(tmp_path / "other"), config))])
    assert [*second.loaded] == ["sql"], "only the first process takes those of the settings"
    second.load("law", str(written(tmp_path / "law")), ("demo",))
    assert first.find("law") == second.find("law") is not None
    first.unload("sql")
    third = adapters_of(model, path)
    third.begin([("sql", read_lora(tmp_path / "sql", config))])
    assert [*third.loaded] == [*second.loaded] == ["law"]
