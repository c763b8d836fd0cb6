"""The server keeps its own OpenAPI document, whatever is asked by it or against it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from alignedserve.gateway.openapi import document
from alignedserve.gateway.text import TextModel
from tests.conftest import SOAK
from tests.gateway.conftest import FakeOwner, Gateway

# Rules across fields are in no schema, and what no tokenizer or grammar can take is known only there: such a body is
# refused with 400 though its schema is kept.
CONFIG = SchemathesisConfig.from_dict(
    {"checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404"]}}}
)
CASES = 300 if SOAK else 15  # by each of the four routes that take a body, and as many against it


@pytest.fixture(scope="module")
def api(text: TextModel) -> Any:
    gateway = Gateway(text, FakeOwner((5,), (2,)))
    return schemathesis.openapi.from_asgi("/openapi.json", gateway.app, config=CONFIG)


ROUTES = [
    (path, method, mode)
    for path, methods in document()["paths"].items()
    for method, described in methods.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or "requestBody" in described  # else nothing can be wrong with it
]


@pytest.mark.parametrize(("path", "method", "mode"), ROUTES)
def test_it_is_kept(api: Any, path: str, method: str, mode: GenerationMode) -> None:
    """By all of schemathesis's checks: no 5xx, no answer that is not in the document, nothing wrong that is taken."""
    operation = api[path][method]

    @settings(
        max_examples=CASES if len(operation.body) else 5,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=not SOAK,
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode))
    def asked(case: Any) -> None:
        case.call_and_validate()

    asked()
