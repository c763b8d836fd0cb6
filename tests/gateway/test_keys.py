"""Tests of what each key permits, and that a caller cannot tell what another caller asked for."""

from __future__ import annotations

import pytest

from alignedserve.core import NO_KEY_SALT
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Limits, Scope, hash_key
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway, log_lines

ANN, BOB = "key-of-ann", "key-of-bob"


def entry(name: str, key: str, *scopes: Scope) -> KeyEntry:
    return KeyEntry(name, hash_key(key), frozenset(scopes or Scope))


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    ring = KeyRing([entry("ann", ANN), entry("bob", BOB, Scope.BATCH)])
    return Gateway(text, FakeOwner((5,), (2,)), keys=ring)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(gateway: Gateway, key: str, **fields: object) -> int:
    body = {"model": "demo", "prompt": "Hi", **fields}
    return gateway.ask("POST", "/v1/completions", json=body, headers=bearer(key)).status_code


def test_a_key_opens_what_its_scopes_name(gateway: Gateway) -> None:
    assert ask(gateway, ANN) == 200
    refused = gateway.get("/v1/models", headers=bearer(BOB))
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("insufficient_scope", "permission_error")
    assert ask(gateway, BOB) == 403
    assert len(gateway.owner.opened) == 1


def test_the_log_names_the_caller_and_no_key(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with log_lines(caplog) as lines:
        ask(gateway, ANN)
        gateway.get("/v1/models", headers=bearer("wrong-key"))
    assert [line["caller"] for line in lines] == ["ann", None]
    assert not any(key in caplog.text + str(lines) for key in (ANN, BOB, "wrong-key", hash_key(ANN)))


def test_kv_is_shared_within_a_key_alone(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((2,)), keys=KeyRing([entry("ann", ANN), entry("bob", BOB)]))
    asked = [(ANN, None), (BOB, None), (ANN, None), (ANN, "own"), (BOB, "own")]
    for key, own in asked:
        assert ask(gateway, key, cache_salt=own) == 200
    salts = [request.salt for request in gateway.owner.opened]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 4
    assert all(salts)
    spelled = salts[1]
    assert ask(gateway, ANN, cache_salt=spelled) == 200
    assert gateway.owner.opened[-1].salt not in salts


def test_the_weight_of_a_key_goes_with_its_requests(text: TextModel) -> None:
    heavy = KeyEntry("ann", hash_key(ANN), limits=Limits(weight=3))
    gateway = Gateway(text, FakeOwner((2,)), keys=KeyRing([heavy, entry("bob", BOB)]))
    for key in (ANN, BOB):
        assert ask(gateway, key) == 200
    assert [request.weight for request in gateway.owner.opened] == [3, 1]


def test_without_keys_everybody_is_anonymous(text: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway(text, FakeOwner((2,)))
    with log_lines(caplog) as lines:
        assert gateway.complete(cache_salt="own").status_code == 200
    assert [line["caller"] for line in lines] == ["anonymous"]
    assert [request.salt for request in gateway.owner.opened] == [f"{NO_KEY_SALT}own"]
