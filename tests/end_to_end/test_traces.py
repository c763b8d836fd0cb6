"""Test of a deployment that sends traces: its gateway's requests, and the lines of its batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx

from tests.end_to_end.deployment import ANSWER_S, deployed, wait_until
from tests.tracing.receiver import receiving

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 5."}], "max_tokens": 8}


def test_chats_and_lines_of_batches_are_traced(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line))
    with receiving() as receiver, deployed("--otlp-endpoint", receiver.url) as deployment:
        httpx.post(f"{deployment.url}/v1/chat/completions", json=CHAT, timeout=ANSWER_S).raise_for_status()
        command = [sys.executable, "-m", "alignedserve", "batch", "submit", str(file), "--url", f"{deployment.url}/v1"]
        subprocess.run([*command, "--wait"], check=True, capture_output=True, timeout=ANSWER_S)
        wait_until(lambda: receiver.classes() == {"rt", "be"}, ANSWER_S)
    assert set(receiver.spans()) == {"llm_request", "queue", "prefill", "decode"}
