"""Take the pictures of docs/guides/metrics.md: the live page of a server at work, and the chat page.

    python -m tests.dashboard_pictures build/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf qwen2.5-coder-0.5b

People chat with the server beside a batch of documents for as long as a chart needs. Needs Chromium (`make chromium`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.browser import Browser, Page, chromium

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH, HEIGHT, CHAT_HEIGHT = 1240, 1262, 860
LOAD_S, PATIENT_S, PEOPLE, DOCUMENTS = 240.0, 300.0, 3, 400
PROMISE = ("--slo-ttft-ms", "4000", "--slo-tbt-ms", "1000")
QUESTIONS = ("What is a deadlock?", "Write a haiku about rain.", "Reverse a list in Python.", "Explain TCP in short.")
SHOWN = "Show in Python how to read a file line by line, briefly. Then compare `read` and `readlines` in a table."


@contextmanager
def serving(model: str, name: str) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "alignedserve",
        "serve",
        model,
        "--served-model-name",
        name,
        "--port",
        "0",
        *PROMISE,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
        finally:
            process.terminate()


def chat_on(url: str, name: str, number: int, is_over: threading.Event) -> None:
    """Chat as a person does, who reads each answer for a while."""
    for question in QUESTIONS * 100:
        if is_over.wait(1 + 2 * number):
            return
        said = [{"role": "user", "content": question}]
        body = {"model": name, "messages": said, "max_tokens": 120, "stream": True}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENT_S)


def submit(url: str, name: str) -> None:
    body = {"model": name, "max_tokens": 200, "messages": [{"role": "user", "content": "Write a story of a ship."}]}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(DOCUMENTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    made = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("ships.jsonl", content)})
    job = {"input_file_id": made.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    httpx.post(f"{url}/v1/batches", json=job).raise_for_status()


def take(page: Page, name: str) -> None:
    page.prefer("light")
    page.until("matchMedia('(prefers-color-scheme: light)').matches")
    (DOCS / f"{name}-light.png").write_bytes(page.picture())


def take_chat(browser: Browser, url: str) -> None:
    with browser.page(f"{url}/", WIDTH, CHAT_HEIGHT) as page:
        page.send("Emulation.setScrollbarsHidden", hidden=True)
        page.until("byId('model').value !== ''")
        page.click("#words")
        page.type(SHOWN)
        page.press("Enter")
        page.until("current.turns.length === 2 && stop === null", PATIENT_S)
        page.value("byId('chat').scrollTop = 0")
        take(page, "chat")


def take_live_page(browser: Browser, url: str, name: str) -> None:
    submit(url, name)
    is_over = threading.Event()
    people = [threading.Thread(target=chat_on, args=(url, name, number, is_over)) for number in range(PEOPLE)]
    for person in people:
        person.start()
    with browser.page(f"{url}/dashboard", WIDTH, HEIGHT) as page:
        page.send("Emulation.setScrollbarsHidden", hidden=True)
        page.value("byId('range').value = '300'")
        time.sleep(LOAD_S)
        decode = "worker.lengths.guests.num_rt + worker.lengths.batch.num_rt"
        page.until(f"shown.workers.some(worker => {decode} > 1)", PATIENT_S)
        take(page, "dashboard")
    is_over.set()
    for person in people:
        person.join()


def main() -> None:
    model, name = sys.argv[1:]
    with (
        serving(model, name) as url,
        tempfile.TemporaryDirectory() as folder,
        chromium(Path(folder, "profile")) as browser,
    ):
        take_chat(browser, url)
        take_live_page(browser, url, name)


if __name__ == "__main__":
    main()
