"""Open WebUI: a server of its own, asked as its page asks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from socket import create_server
from typing import Any

from tries import Report

url, model, question = sys.argv[1:]
report = Report("open-webui")
START_S = 400
with create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
SETTINGS = {
    "OPENAI_API_BASE_URL": url,
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    "DATA_DIR": str(Path.cwd()),
    # without network
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
}


def ask(path: str, body: Any = None, token: str = "none") -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as answer:
        return json.load(answer)


def signed_in() -> str:
    """Return the token of the only user, when the server has started."""
    ends_at = time.monotonic() + START_S
    while True:
        try:
            return str(ask("/api/v1/auths/signin", {"email": "", "password": ""})["token"])
        except OSError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(1)


command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1", "--port", port]
server = subprocess.Popen(command, env={**os.environ, **SETTINGS}, stdout=sys.stderr)
token = signed_in()


@report.tries("models")
def models() -> list[str]:
    return [each["id"] for each in ask("/api/models", token=token)["data"] if each["owned_by"] != "arena"]


@report.tries("chat")
def chat() -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": False,
        "temperature": 0,
        "max_tokens": 64,
    }
    ask("/api/models", token=token)  # it knows the models that it has listed
    return str(ask("/api/chat/completions", body, token)["choices"][0]["message"]["content"])


try:
    report.say()
finally:
    server.terminate()
    server.wait()
