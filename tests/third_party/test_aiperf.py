"""Tests that a load generator can measure a deployment: its requests succeed, and its numbers equal ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.deployment import Deployment
from tests.third_party.conftest import NAME, QUESTION, Answer
from tests.third_party.environments import ONLY_IN_SOAK, Environment
from tests.third_party.table import row, tries

AIPERF = Environment("aiperf", ("aiperf==0.13.0",))
REQUESTS = 12

pytestmark = [
    ONLY_IN_SOAK,
    row("aiperf", "0.13.0"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="aiperf 0.13 asks for Python 3.11 or newer"),
]


def _load(deployment: Deployment, model: str, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    arguments = deployment.url, model, QUESTION, str(tokenizer), str(REQUESTS)
    return AIPERF.run("load_with_aiperf.py", *arguments, home=tmp_path_factory.mktemp("aiperf"))


@pytest.fixture(scope="module")
def report(deployment: Deployment, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _load(deployment, NAME, folder, tmp_path_factory)


@tries("a load test")
def test_every_request_succeeds(report: Any, plain: Answer) -> None:
    assert (report["version"], report["exit_code"]) == ("0.13.0", 0)
    assert [request["error"] for request in report["requests"]] == [None] * REQUESTS
    assert report["texts"] == [plain.text] * REQUESTS


@tries("counts of tokens")
def test_its_counts_are_ours(report: Any, plain: Answer) -> None:
    for request in report["requests"]:
        assert {name: request[f"usage_{name}"] for name in plain.usage} == plain.usage
        assert request["time_to_first_token"] > 0
        # It counts again with the model's tokenizer, without the token that ends an answer; our count has that token.
        assert plain.usage["completion_tokens"] - request["output_sequence_length"] in (0, 1)


@tries("metrics")
def test_it_reads_our_metrics(report: Any) -> None:
    assert any(name.startswith("alignedserve:") for name in report["scraped"])


@tries("an unknown model")
def test_it_reports_a_404(deployment: Deployment, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    report = _load(deployment, "other", folder, tmp_path_factory)
    assert report["exit_code"] != 0
    errors = [request["error"] for request in report["requests"]]
    assert [error["code"] for error in errors] == [404] * REQUESTS
    assert all("model_not_found" in error["message"] for error in errors)
