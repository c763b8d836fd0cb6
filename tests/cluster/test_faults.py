"""Tests of faults that are planted in nodes of a real Ray cluster: each is a line before anything is placed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from alignedserve.kernels.build import NoCompiler, find_compiler
from tests.cluster.conftest import Nodes, clustered
from tests.cluster.false_gpus import false_gpus

HEAD, WITH_GPUS = {"CPU": 0}, {"CPU": 2, "GPU": 2}
NOWHERE = "nowhere.invalid"
ENDS_S = 120.0


def _compiles() -> bool:
    try:
        return bool(find_compiler())
    except NoCompiler:
        return False


pytestmark = pytest.mark.skipif(not _compiles(), reason="a false driver is compiled from C")


class _Gated(BaseHTTPRequestHandler):
    """A hub that gives nothing to those without a token."""

    def do_HEAD(self) -> None:
        self.send_response(401 if "Authorization" not in self.headers else 404)
        self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gated) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def faults(nodes: Nodes, *flags: str) -> list[str]:
    """Return the lines on faults of a start that ends by itself, which names no part: none was placed."""
    where = ("serve", "--launcher", "ray", "--ray-address", nodes.address, "--topology", "auto", "--port", "0")
    began_at = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "alignedserve", *where, *flags],
        env=os.environ | nodes.environment,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    took_s = time.monotonic() - began_at
    assert done.returncode == 2, done.stderr
    assert "serving" not in done.stdout
    assert not any(" wait for a node with" in line for line in done.stderr.splitlines()), "nothing was placed"
    print(f"{took_s:.1f} s: {done.stderr}")
    lead = "alignedserve: fault: "
    return [line.removeprefix(lead) for line in done.stderr.splitlines() if line.startswith(lead)]


def test_each_planted_fault_is_a_line_that_says_how_to_mend_it(tmp_path: Path) -> None:
    types = {"available_node_types": {"head": {}}, "head_node_type": "head"}
    (file := tmp_path / "cluster.yaml").write_text(
        yaml.safe_dump({"provider": {"type": "local", "worker_ips": [NOWHERE]}, **types})
    )
    with hub() as endpoint:
        planted = {"CC": "/nowhere/gcc", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_TOKEN": ""}
        planted |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        with clustered(HEAD, WITH_GPUS, environment=false_gpus(2, tmp_path) | planted) as nodes:
            found = faults(nodes, "org/gated", "--ray-cluster-file", str(file))
            terms = "org/gated cannot be fetched: the hub gives it only after you accept its terms"
            assert any(terms in line and "secrets/hf-token" in line for line in found)
            compiler = [line for line in found if "no C compiler (gcc)" in line]
            assert compiler
            assert all(line.endswith(": apt-get install gcc libc6-dev python3-dev") for line in compiler)

            large = faults(nodes, "demo", "--pool-memory-mb", "99999999", "--ray-cluster-file", str(file))
            assert any(
                ": the KV pool takes 99999999 MB: start the container with a larger --shm-size" in line
                for line in large
            )
            assert any(line.startswith(f"{NOWHERE}: it cannot be reached by SSH from the head") for line in large)


def test_an_old_driver_is_a_line_with_the_version_that_is_needed(tmp_path: Path) -> None:
    with clustered(HEAD, WITH_GPUS, environment=false_gpus(2, tmp_path, cuda=12080)) as nodes:
        found = faults(nodes, "demo")
    (old,) = found
    assert (
        "driver 570.124.06 runs CUDA 12, and torch is built for CUDA 13.0, so it sees no GPU: install driver 580" in old
    )
