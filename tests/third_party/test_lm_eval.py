"""Tests that a benchmark of models gives a deployment the same score as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alignedserve.lab.benchmarks.accuracy import expand, published
from tests.end_to_end.deployment import Deployment
from tests.smollm2 import smollm2
from tests.third_party.conftest import NAME
from tests.third_party.environments import ONLY_IN_SOAK, Environment
from tests.third_party.table import row, tries

LM_EVAL = Environment("lm_eval", ("lm-eval[api,hf]==0.4.13", "torch==2.13.0"))

pytestmark = [ONLY_IN_SOAK, row("lm-eval", "0.4.13")]


@tries("scores of a benchmark")
def test_scores_are_those_of_transformers(
    deployment: Deployment, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("lm_eval")
    expand(published(smollm2()), home / "weights", torch.float32)
    folders = str(folder), str(home / "weights")
    report = LM_EVAL.run("score_with_lm_eval.py", deployment.url, NAME, *folders, home=home)
    assert report["version"] == "0.4.13"
    assert report["served"]["scores"] == pytest.approx(report["transformers"]["scores"])
    of_all = zip(report["served"]["logprobs"], report["transformers"]["logprobs"], strict=True)
    for served, expected in of_all:
        assert served == pytest.approx(expected, abs=0.01), "of each choice"
