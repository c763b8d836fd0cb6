"""Tests of cluster.yaml and of what it starts, as far as that is possible without machines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from alignedserve.config.choices import Launcher
from alignedserve.config.config import load

ROOT = Path(__file__).resolve().parents[2]


def test_ray_takes_the_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text())))


def test_what_it_starts_is_there() -> None:
    started = re.findall(r"~/alignedserve/(deploy/[\w.]+)", (ROOT / "cluster.yaml").read_text())
    assert {"deploy/env.sh", "deploy/serve.sh", "deploy/serve.yaml", "deploy/join.sh"} <= set(started)
    assert [name for name in started if not (ROOT / name).is_file()] == []


def test_what_it_serves_is_a_configuration() -> None:
    config = load({}, {}, ROOT / "deploy" / "serve.yaml")
    assert (config.launcher, config.ray.address, config.server.host) == (Launcher.RAY, "auto", "127.0.0.1")


@pytest.mark.parametrize("script", sorted((ROOT / "deploy").glob("*.sh")), ids=lambda path: path.name)
def test_shells_can_read_the_scripts(script: Path) -> None:
    assert subprocess.run(["sh", "-n", script], capture_output=True).stderr == b""
