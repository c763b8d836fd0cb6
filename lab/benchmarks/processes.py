"""Measure an idle deployment: the memory of each process, and the time from its start until it is ready.

    python -m lab.benchmarks.processes                         # processes of this machine
    python -m lab.benchmarks.processes --launcher ray          # actors of a Ray cluster of one node

It starts a deployment of the demo model `--starts` times, without profiling its steps, and reports the time until each
was ready. With `--launcher ray`, a cluster is started before, and the time runs from the end of `ray start`. For each
process of the last deployment, after some seconds without a request, it reports the resident memory (RSS), which counts
shared memory in every process, and the proportional part of it (PSS).
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from alignedserve.lab.benchmarks.common.report import command, report
from alignedserve.lab.benchmarks.common.serving import name_of, serve

_MARK = "ALIGNED_BENCHMARK_DEPLOYMENT"  # a variable in the environment of all started processes
_IDLE_S = 5.0  # after this time, the temporary memory of the start is given back
_STORE = 80_000_000  # bytes: about the least that Ray accepts


@contextmanager
def ray_cluster(environment: Mapping[str, str]) -> Iterator[str]:
    """Start a cluster of this machine only, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", "--num-cpus=8", "--include-dashboard=false", f"--object-store-memory={_STORE}"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as head:
        try:
            assert head.stdout is not None
            output = ""
            while "Ray runtime started" not in output:
                line = head.stdout.readline()
                if not line:
                    raise SystemExit(f"`ray start` has failed:\n{output}")
                output += line
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()


def memory(mark: str) -> Iterator[tuple[str, float, float]]:
    """Yield the name, RSS and PSS in MB of each process with this mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile, or belongs to another user
            if f"{_MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            name = name_of((folder / "cmdline").read_text().replace("\0", " "))
            sizes = dict(re.findall(r"^(Rss|Pss): +(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE))
            if name is not None:
                yield name, int(sizes["Rss"]) / 1024, int(sizes["Pss"]) / 1024


def measure(starts: int, topology: str, launcher: str) -> None:
    for number in range(starts):
        mark = secrets.token_hex(8)
        with TemporaryDirectory(prefix="as-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
            ours = {_MARK: mark, "SPT_NOENV": "1"}  # otherwise Ray's processes write their names over their environment
            ours |= {"ALIGNEDSERVE_JOBS_DIRECTORY": f"{folder}/jobs", "RAY_TMPDIR": folder}
            ours |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
            environment = os.environ | ours
            flags = ["--topology", topology, "--launcher", launcher, "--profile-s", "0"]
            if launcher == "ray":
                flags += ["--ray-address", stack.enter_context(ray_cluster(environment))]
            deployment = stack.enter_context(serve("demo", *flags, environment=environment))
            tell(launcher, deployment.ready_s, mark, number == starts - 1)


def tell(launcher: str, ready_s: float, mark: str, is_last: bool) -> None:
    report(f"{launcher}, from its start to ready", ready_s, "s")
    if not is_last:
        return
    time.sleep(_IDLE_S)
    for name, resident, own in sorted(memory(mark)):
        report(f"{launcher}, RSS of {name}", resident, "MB")
        report(f"{launcher}, PSS of {name}", own, "MB")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--starts", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--topology", default="1+1", help="default: %(default)s")
    parser.add_argument("--launcher", choices=["local", "ray"], default="local", help="default: %(default)s")
    options = parser.parse_args()
    measure(options.starts, options.topology, options.launcher)


if __name__ == "__main__":
    main()
