"""Tests that a benchmark starts the server of a peer with its settings, and leaves nothing of it behind."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from alignedserve.lab.benchmarks.common.peers import LLAMA_SERVER, serve_llama_cpp

SERVER = """
import http.server, json, pathlib, sys
pathlib.Path(__file__).with_name("flags.json").write_text(json.dumps(sys.argv[1:]))
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
"""


def llama_server(folder: Path, code: str) -> Path:
    program = folder / LLAMA_SERVER
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    return folder


def test_it_serves_with_so_many_slots_and_is_gone_at_the_end(tmp_path: Path) -> None:
    with serve_llama_cpp(llama_server(tmp_path, SERVER), Path("m.gguf"), slots=8, context=1000) as url:
        assert httpx.get(f"{url}/health", trust_env=False).is_success
    words = json.loads((tmp_path / "flags.json").read_text())
    flags = dict(pairwise(words))
    assert (flags["-m"], flags["-np"], flags["-c"]) == ("m.gguf", "8", "8000")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match=r"llama\.cpp did not start: no such model"),
        serve_llama_cpp(llama_server(tmp_path, "import sys; sys.exit('no such model')"), Path("m.gguf"), 1, 10),
    ):
        pass
