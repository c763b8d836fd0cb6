"""A server around OpenVINO GenAI's continuous batching, run by a Python of its own that has `openvino-genai`:

    PYTHON openvino_server.py FILE.gguf NAME THREADS --host HOST --port PORT

It has `/health`, `/v1/models` and streamed `/v1/completions` of token ids, all that our benchmarks ask: the package has
no server. One thread steps the pipeline; each request's own thread sends its tokens.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, ClassVar

import numpy as np
import openvino as ov  # pyrefly: ignore[missing-import]
import openvino_genai as genai  # pyrefly: ignore[missing-import]

_CACHE_GB = 2


class Batching:
    """Steps a pipeline while it has requests, and hands out each request's new tokens."""

    def __init__(self, model: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = _CACHE_GB, False
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._new: queue.Queue[tuple[np.ndarray[Any, Any], Any, queue.Queue[list[int] | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, prompt: list[int], most: int) -> queue.Queue[list[int] | None]:
        """Return where the tokens of an answer will be, as they come; None ends it."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = most, False, True
        tokens: queue.Queue[list[int] | None] = queue.Queue()
        self._new.put((np.array([prompt], dtype=np.int64), config, tokens))
        return tokens

    def _run(self) -> None:
        numbers, answers = count(), list[tuple[Any, queue.Queue[list[int] | None]]]()
        while True:
            while not answers or not self._new.empty():
                ids, config, tokens = self._new.get()
                answers.append((self._pipeline.add_request(next(numbers), ov.Tensor(ids), config), tokens))
            self._pipeline.step()
            for handle, tokens in answers:
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.put(list(output.generated_ids))
            ended = [tokens for handle, tokens in answers if handle.get_status() != genai.GenerationStatus.RUNNING]
            for tokens in ended:
                tokens.put(None)
            answers = [answer for answer in answers if answer[1] not in ended]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    batching: ClassVar[Batching]
    name: ClassVar[str]

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, most, number = body["prompt"], body["max_tokens"], 0
        tokens = self.batching.ask(prompt, most)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while (new := tokens.get()) is not None:
            number += len(new)
            self._piece({"choices": [{"index": 0, "text": " ", "token_ids": new, "finish_reason": None}]})
        self._piece({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]})
        self._piece({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": number}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _piece(self, piece: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(piece)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, tree: dict[str, Any]) -> None:
        data = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model"), parser.add_argument("name"), parser.add_argument("threads", type=int)
    parser.add_argument("--host", required=True), parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    Handler.name, Handler.batching = args.name, Batching(args.model, args.threads)
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
