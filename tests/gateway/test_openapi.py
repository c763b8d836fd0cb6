"""Tests that the server keeps its own OpenAPI document, for valid and invalid requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from starlette.routing import Route

from alignedserve.config.sections import JobsConfig
from alignedserve.gateway.app import make_app
from alignedserve.gateway.batches import BatchRoutes
from alignedserve.gateway.files import FileRoutes
from alignedserve.gateway.http.middleware import PAGE, PUBLIC
from alignedserve.gateway.openapi import document
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.store.storage import LazyStorage
from alignedserve.store.store import Holder
from alignedserve.text.text_model import TextModel
from tests.conftest import SOAK
from tests.gateway.conftest import MODEL, MOST, FakeOwner, Gateway
from tests.rare import rarely, thinned

# A schema states no rules across fields, and only a tokenizer or a grammar knows what it refuses: such a body is
# refused with 400 though it fits its schema.
CONFIG = SchemathesisConfig.from_dict(
    {"checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404"]}}}
)
CASES = 200 if SOAK else 2  # valid bodies for each of the six routes that take a body, and as many invalid bodies


@pytest.fixture(scope="module")
def app(text: TextModel, tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    jobs = JobsConfig(directory=str(tmp_path_factory.mktemp("jobs")))
    keeping = LazyStorage(jobs, Holder("gateway", 1))
    job_routes = (*FileRoutes(keeping, jobs).routes, *BatchRoutes(keeping, jobs).routes)
    settings = GatewaySettings((MODEL,), MOST, names=("testserver",))  # the Host that schemathesis sends
    return make_app(FakeOwner((5,), (2,)), text, settings, job_routes=job_routes)


@pytest.fixture(scope="module")
def api(app: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app, config=CONFIG)


MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)  # a route without a body cannot get an invalid body


def _routes() -> Iterator[Any]:
    """Yield the routes; those are rare whose body another route has, and most without one."""
    bodies: list[Any] = []
    without: list[Any] = []
    for path, methods in document(with_jobs=True)["paths"].items():
        for method, described in methods.items():
            body = described.get("requestBody")
            if body is None:
                without.append((path, method, MODES[0]))
                continue
            for mode in MODES:
                yield rarely((path, method, mode)) if body in bodies else (path, method, mode)
            bodies.append(body)
    yield from thinned(without, usual=6)


ROUTES = list(_routes())


@pytest.mark.parametrize(("path", "method", "mode"), ROUTES)
def test_it_is_kept(api: Any, path: str, method: str, mode: GenerationMode) -> None:
    """All of schemathesis's checks hold: no 5xx, no answer outside the document, no invalid body accepted."""
    operation = api[path][method]

    @settings(
        max_examples=CASES if len(operation.body) else 2,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode))
    def asked(case: Any) -> None:
        case.call_and_validate()

    asked()


@pytest.mark.parametrize("body", ["ChatRequest", "CompletionRequest"])
def test_it_has_every_field_of_a_promise(body: str) -> None:
    schemas = document(with_jobs=False)["components"]["schemas"]
    assert schemas[body]["properties"]["slo"]["anyOf"][0] == {"$ref": "#/components/schemas/SloFields"}
    assert set(schemas["SloFields"]["properties"]) == {"ttft_ms", "tbt_ms", "jct_ms", "strict"}


def test_every_route_is_in_it_and_no_other(app: FastAPI, text: TextModel) -> None:
    def served(app: FastAPI) -> set[tuple[str, str]]:
        found = {
            (route.path, method) for route in app.routes if isinstance(route, Route) for method in route.methods or ()
        }
        api = {(path, method) for path, method in found if not path.startswith(PAGE) and method != "HEAD"}
        return {(path.replace(":path", ""), method.lower()) for path, method in api}

    def described(with_jobs: bool) -> set[tuple[str, str]]:
        return {(path, method) for path, methods in document(with_jobs)["paths"].items() for method in methods}

    assert served(app) == described(with_jobs=True)
    paths = document(with_jobs=True)["paths"]
    needs_key = {path for path, methods in paths.items() for described in methods.values() if "security" in described}
    assert needs_key == paths.keys() - PUBLIC
    without = Gateway(text, FakeOwner())
    assert served(without.app) == described(with_jobs=False)
    assert without.get("/openapi.json").json() == document(with_jobs=False)
