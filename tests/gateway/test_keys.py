"""Tests of what each key permits, and that a caller cannot tell what another caller asked for."""

from __future__ import annotations

import pytest

from alignedserve.core import NO_KEY_SALT
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Limits, Scope, hash_key
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner, Gateway, log_lines

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


ROUTES = {  # what a reader needs, and what tells of others or changes what others have
    "/v1/models": Scope.GENERATE,
    "/metrics": Scope.METRICS,
    "/dashboard": Scope.DASHBOARD,
    "/dashboard/requests/x": Scope.DASHBOARD,
}
PUBLIC_STATUS = {
    "state": "ready",
    "models": [MODEL],
    "promise": {"ttft_ms": 1000.0, "tbt_ms": 187.5, "by": "machine"},
}
NEED_NO_KEY = ("/", "/docs", "/live", "/health", "/ready")


@pytest.mark.parametrize("scope", Scope)
def test_each_scope_opens_its_routes_alone(text: TextModel, scope: Scope) -> None:
    gateway = Gateway(text, FakeOwner(), keys=KeyRing([entry("ann", ANN, scope)]))
    for path, needed in ROUTES.items():
        status = gateway.get(path, headers=bearer(ANN)).status_code
        opens = scope is needed or (path, scope) == ("/metrics", Scope.DASHBOARD)
        assert (status != 403) == opens, (path, status)
        assert gateway.get(path).status_code == 401
        assert gateway.get(path, headers=bearer("wrong")).status_code == 401
    assert {gateway.get(path).status_code for path in NEED_NO_KEY} == {200}
    told = gateway.get("/status", headers=bearer(ANN)).json()
    assert ("parts" in told) == (scope is Scope.DASHBOARD)
    assert PUBLIC_STATUS.items() <= told.items()
    assert scope is Scope.DASHBOARD or told == PUBLIC_STATUS


def test_who_is_anonymous_and_comes_from_elsewhere_gets_what_a_reader_needs(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner((2,)), is_exposed=True)
    assert gateway.complete().status_code == gateway.get("/v1/models").status_code == 200
    adapter = {"lora_name": "a", "lora_path": "/a"}
    refused = [gateway.get(path) for path in ROUTES if ROUTES[path] is not Scope.GENERATE]
    refused += [gateway.ask("POST", f"/v1/{verb}_lora_adapter", json=adapter) for verb in ("load", "unload")]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(403, "insufficient_scope")}
    assert "it has no keys" in refused[0].json()["error"]["message"]
    assert gateway.get("/status").json() == PUBLIC_STATUS
    here = Gateway(text, FakeOwner((2,)))
    assert "parts" in here.get("/status").json()
    assert [here.get(path).status_code for path in ("/metrics", "/dashboard")] == [200, 200]
