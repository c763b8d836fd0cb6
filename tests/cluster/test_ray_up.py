"""Tests of a real `ray up cluster.yaml`: over SSH, to two machines on one wire, to a served endpoint, and down again.

The machines have GPUs that only a driver's library tells of (false_gpus): workers are placed on them, and compute on
CPUs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import alignedserve
from alignedserve.architectures.model_source import cache_directory
from alignedserve.architectures.named_models import NAMED
from tests.cluster.false_gpus import false_gpus
from tests.cluster.machines import Machines, machines, missing
from tests.end_to_end.deployment import wait_until
from tests.rare import rare
from tests.smollm2 import smollm2

ROOT = Path(alignedserve.__file__).parents[1]
VENV = Path(sys.prefix)
HEAD, WORKER = ADDRESSES = ("10.77.0.1", "10.77.0.2")
NOWHERE = "10.77.0.9"
UP_S = 900.0
DOWN_S = 300.0
GONE_S = 240.0  # a node gives its head up after 20 s, and ends
WALK_S = 300.0  # from bare machines to words, without downloads
WHY_NOT = missing()
SMALL = {"kvpool": {"memory_mb": 64}, "engine": {"profile_s": 0}}

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no machines for `ray up` here: {WHY_NOT}")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machines]:
    """Yield a head with one false GPU and a worker with two."""
    with machines(tmp_path, ADDRESSES) as made:
        for network, number in zip(made.networks, (1, 2), strict=True):
            names = false_gpus(number, tmp_path) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            lines = [f"export {name}={shlex.quote(value)}\n" for name, value in names.items()]
            (tmp_path / network / "home" / ".bashrc").write_text("".join(lines))
        yield made


def ours(two: Machines, workers: Sequence[str], model: str) -> Path:
    """Return cluster.yaml changed as its comments say."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["provider"] |= {"head_ip": HEAD, "worker_ips": [*workers]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(two.key)}
    if not (secrets := two.folder / "secrets").exists():
        secrets.mkdir(mode=0o700)
        (secrets / "ray-token").write_text("ab" * 32)
        shutil.copytree(ROOT / "deploy", two.folder / "deploy")
        (two.folder / "dist").mkdir()
    served: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    (two.folder / "deploy" / "serve.yaml").write_text(yaml.safe_dump(served | SMALL | {"model": model}))
    mounted = {where: str(two.folder / name) for where, name in config["file_mounts"].items()}
    path = two.folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config | {"file_mounts": mounted}))
    return path


def without_setup(path: Path) -> Path:
    """Have what is installed here in place of the setup commands, and return the path."""
    config = yaml.safe_load(path.read_text())
    login = "grep -qs alignedserve ~/.bashrc || echo '. ~/alignedserve/deploy/env.sh' >> ~/.bashrc"
    installed = f"mkdir -p ~/alignedserve && ln -sfn {VENV} ~/alignedserve/venv"
    path.write_text(yaml.safe_dump(config | {"setup_commands": [installed, login]}))
    return path


def run(two: Machines, *command: str | Path, timeout_s: float = DOWN_S) -> str:
    done = two.run(*command, timeout_s=timeout_s)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}\n{two.log(HEAD)}"
    return done.stdout


def said(two: Machines, model: str, content: str, **more: object) -> str:
    """Return what the model says on the head."""
    chat = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}
    url = "http://127.0.0.1:8000/v1/chat/completions"
    asked = run(two, "curl", "-sS", url, "-H", "content-type: application/json", "-d", json.dumps(chat))
    return str(json.loads(asked)["choices"][0]["message"]["content"])


def places(two: Machines, cluster: Path) -> dict[str, str]:
    """Return the address of each part."""
    told = run(two, VENV / "bin" / "ray", "exec", cluster, "alignedserve status --json")
    parts = json.loads(next(line for line in told.splitlines() if line.startswith('{"state"')))["parts"]
    return {part["name"]: part["address"].split("/")[2].split(":")[0] for part in parts}


def table(up: str) -> list[str]:
    """Return the lines of the table, without colours and spaces of a terminal."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in up.splitlines()]
    return [line for line in lines if line.startswith(("node ", "not used: ", "roads of KV: "))]


def test_up_ends_with_a_served_endpoint_and_down_leaves_nothing(two: Machines) -> None:
    """All GPUs are used, the head's too; a machine that is not there is named, and is no reason not to serve."""
    ray, cluster = VENV / "bin" / "ray", without_setup(ours(two, [WORKER, NOWHERE], "demo"))
    up = run(two, ray, "up", "-y", cluster, timeout_s=UP_S)
    assert f"fault: {NOWHERE}: it cannot be reached by SSH from the head" in up
    assert "topology: 3xcolocated: all run prompts and decodes, since no gap between tokens was promised" in up
    assert table(up) == [
        f"node {HEAD}: decode-2, gateway-0, jobs-0, pool-1, router; 1 x NVIDIA H100 false",
        f"node {WORKER}: decode-0, decode-1, pool-0; 2 x NVIDIA H100 false",
        f"not used: {NOWHERE}: it has not joined the cluster",
        "roads of KV: none is needed: each worker runs the prompts that it decodes",
    ]
    counted = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert said(two, "demo", "Count from 3 to 12.") == counted
    wait_until(lambda: {f"decode-{number}" for number in range(3)} <= places(two, cluster).keys(), GONE_S)
    where = places(two, cluster)
    assert {where[name] for name in ("pool-0", "decode-0", "decode-1")} == {WORKER}
    assert {where[name] for name in ("router", "gateway-0", "pool-1", "decode-2")} == {HEAD}

    lines, results = two.folder / "lines.jsonl", two.folder / "results.jsonl"
    body = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 12."}], "temperature": 0}
    each = {"method": "POST", "url": "/v1/chat/completions"}
    lines.write_text("".join(json.dumps(each | {"custom_id": f"line-{n}", "body": body}) + "\n" for n in range(3)))
    run(two, VENV / "bin" / "alignedserve", "batch", "submit", lines, "--wait", "--out", results)
    answers = [json.loads(line) for line in results.read_text().splitlines()]
    found = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
    assert found == {f"line-{n}": counted for n in range(3)}

    run(two, ray, "exec", cluster, "alignedserve stop")
    wait_until(lambda: not any("alignedserve serve" in line for line in two.processes(0)), GONE_S)
    down(two, cluster)


def down(two: Machines, cluster: Path) -> None:
    run(two, VENV / "bin" / "ray", "down", "-y", cluster)
    wait_until(lambda: not any(map(two.processes, range(2))), GONE_S, lambda: str([*map(two.processes, range(2))]))


@rare
def test_from_bare_machines_to_words_with_a_node_that_comes_and_one_that_goes(two: Machines) -> None:
    """The files as they are shipped, with their setup commands: all packages come from a folder, by the locks."""
    file, ray = smollm2(), VENV / "bin" / "ray"
    cluster = ours(two, [], "smollm2")
    _fill(two, file)
    began_at = time.monotonic()
    up = run(two, ray, "up", "-y", cluster, timeout_s=UP_S)
    assert said(two, "smollm2", "Say hello.", max_tokens=8)
    took_s = time.monotonic() - began_at
    print(f"from a bare machine to words: {took_s:.0f} s")
    assert took_s < WALK_S
    assert table(up)[0] == f"node {HEAD}: decode-0, gateway-0, jobs-0, pool-0, router; 1 x NVIDIA H100 false"

    up = run(two, ray, "up", "-y", ours(two, [WORKER], "smollm2"), timeout_s=UP_S)
    assert "topology: 3xcolocated" in up
    wait_until(lambda: {HEAD, WORKER} == _decode_at(two, cluster), GONE_S)

    two.end(1)
    wait_until(lambda: _decode_at(two, cluster) == {HEAD}, GONE_S)
    assert said(two, "smollm2", "Say hello.", max_tokens=8), "the head's worker goes on"
    run(two, ray, "down", "-y", cluster)
    wait_until(lambda: not two.processes(0), GONE_S, lambda: str(two.processes(0)))


def _decode_at(two: Machines, cluster: Path) -> set[str]:
    return {where for name, where in places(two, cluster).items() if name.startswith("decode")}


def _fill(two: Machines, model: Path) -> None:
    """Put a wheel of this checkout into dist, what the locks name into a folder that pip takes all from, and smollm2
    into the caches of both machines."""
    wheels, locks = two.folder / "wheels", ROOT / "deploy" / "locks"
    pip = [sys.executable, "-m", "pip"]
    fetched = ["download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(wheels)]
    for lock in ("torch-cpu.txt", "serve.txt", "image.txt"):
        subprocess.run([*pip, *fetched, "-r", str(locks / lock)], check=True)
    left_out = shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, two.folder / "source", symlinks=True, ignore=left_out)
    built = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(two.folder / "dist")]
    names = os.environ | {"CPU_KERNELS": "here"}
    subprocess.run([*pip, *built, str(two.folder / "source")], env=names, check=True)
    for network in two.networks:
        home = two.folder / network / "home"
        (config := home / ".config" / "pip").mkdir(parents=True)
        (config / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n")
        kept = NAMED["smollm2"].path(home / ".cache" / "alignedserve")
        kept.parent.mkdir(parents=True)
        shutil.copy(model, kept)
    assert NAMED["smollm2"].is_in(cache_directory(None))
