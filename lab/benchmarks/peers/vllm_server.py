"""vLLM's HTTP server on the demo model, to hold ours against: started with another Python, which has it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.lab.benchmarks.gateway import MAX_MODEL_LEN, MODEL, Server

START_S = 300.0
_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def serving(python: str) -> Iterator[Server]:
    """Start vLLM's server; its front end is the process that was started, its engine another."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["--model", str(DEMO_FOLDER), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *flags, "--disable-uvicorn-access-log"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _SETTINGS
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait(process, port)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            if probe.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not start within {START_S:.0f} s: see what it said above")
