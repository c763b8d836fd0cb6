"""A chat in the terminal with any server that has an OpenAI-compatible HTTP API.

user's line ──▶ ChatSession.turn ──▶ ChatApi.answer ──▶ POST /chat/completions, streamed
                    │               ├── while the server is full: a line that says how long, and the next try
                    │               └── pieces of text, printed as they come
                    └── keeps both sides of the turn, or neither where it failed: the line is in the next prompt
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from io import TextIOWrapper
from time import monotonic, sleep
from typing import Any, TypeAlias

import httpx

from alignedserve.cli.remote.options import ChatOptions
from alignedserve.errors import ChatError
from alignedserve.http_client import (
    CONTROL,
    DONE,
    PATIENCE_S,
    PLACE,
    SILENCE_S,
    RemoteServer,
    api_at,
    complaint,
    one_line,
)
from alignedserve.progress import StatusLine

Message: TypeAlias = dict[str, str]

_COMMANDS = "/reset forgets the chat, /system TEXT sets the system prompt, /quit or Ctrl-D ends, Ctrl-C interrupts"
_QUIT, _HELP = ("/quit", "/exit", "/bye", "/q"), ("/help", "/?")


def run(options: ChatOptions) -> int:
    """Chat until the input ends; return 1 where a turn of piped input failed, since a script wants to know."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # no character ends the chat
    person = sys.stdin.isatty()
    with ChatApi(options, counts_tokens=person) as server:
        failed = ChatSession(server, options.system, person).run()
    return 1 if failed and not person else 0


class ContextFull(ChatError):
    """The conversation is longer than what the model can read."""


class ChatSession:
    """Holds both sides of the conversation; reads questions and prints answers."""

    def __init__(self, server: ChatApi, system: str | None, person: bool) -> None:
        self._server = server
        self._system = system
        self._person = person  # at a terminal, in contrast to piped input
        self._turns: list[Message] = []
        self._unanswered = ""  # the last question, where no answer came: with it the next prompt begins
        self._failed = False

    def run(self) -> bool:
        """Chat until the input ends, and return whether any turn failed."""
        if self._person:
            with suppress(ImportError):
                import readline  # gives `input` editing and history

                readline.set_startup_hook(lambda: readline.insert_text(self._unanswered))
            print(_COMMANDS)
            with self._told():
                print(f"Chatting with {self._server.model} at {self._server.url}")
        for line in self._lines():
            if line in _QUIT:
                break
            with self._told():
                self._command(line) if line.startswith("/") else self._turn(line)
        return self._failed

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = input("> " if self._person else "").strip()
            except EOFError:
                if self._person:
                    print()
                return
            except KeyboardInterrupt:
                if not self._person:
                    raise
                print()
                continue
            finally:
                self._unanswered = ""
            if line:
                yield line

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell of an error, and go on."""
        try:
            yield
        except ChatError as error:
            self._failed = True
            print(f"alignedserve: {error}", file=sys.stderr, flush=True)

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/reset":
            self._turns.clear()
        elif name in _HELP:
            print(_COMMANDS)
        elif name == "/system":
            self._system = text.strip() or None
        else:
            raise ChatError(f"{name} is not a command: {_COMMANDS}")

    def _turn(self, line: str) -> None:
        """Ask a question and show the answer; both are kept, or neither. Where the context is full, old turns go."""
        asked: Message = {"role": "user", "content": line}
        before: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        kept, self._unanswered = self._turns, line
        while True:
            try:
                answer = self._show(self._server.answer([*before, *kept, asked]))
                break
            except ContextFull:
                if not kept:
                    raise
                kept = kept[2:]
        if self._server.tokens is not None:
            print("(tokens: {:,} in the answer, {:,} in the conversation)".format(*self._server.tokens))
        if num_forgotten := (len(self._turns) - len(kept)) // 2:
            print(f"(the context is full: {num_forgotten} of the oldest turns are forgotten)", file=sys.stderr)
        if answer:
            self._turns, self._unanswered = [*kept, asked, {"role": "assistant", "content": answer}], ""
        else:
            self._turns = kept

    def _show(self, pieces: Generator[str, None, None]) -> str:
        """Print the answer as it comes, and return as much as came before Ctrl-C."""
        shown: list[str] = []
        try:
            with closing(pieces):
                for piece in pieces:
                    shown.append(piece)
                    print(piece.translate(CONTROL), end="", flush=True)
        except KeyboardInterrupt:
            if not self._person:
                raise
        finally:
            if shown:
                print(flush=True)
        return "".join(shown)


class ChatApi(RemoteServer):
    """The API of a server; every failure is a ChatError of one line."""

    kind = ChatError

    def __init__(self, options: ChatOptions, counts_tokens: bool) -> None:
        super().__init__(api_at(options.url), options.api_key, PATIENCE_S, ca=options.ca)
        self._asked = options
        self._model = options.model
        self._counts_tokens = counts_tokens
        self._status = StatusLine(sys.stderr)  # one for each question
        self.tokens: tuple[int, int] | None = None  # of the last answer, and of the conversation with it, where told

    @property
    def model(self) -> str:
        if self._model is None:
            self._model = self._first_model()
        return self._model

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Yield the pieces of the answer's text as they come."""
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if self._counts_tokens:
            body["stream_options"] = {"include_usage": True}
        for name in ("max_tokens", "temperature"):
            if getattr(self._asked, name) is not None:
                body[name] = getattr(self._asked, name)
        ended = False
        self.tokens, self._status = None, StatusLine(sys.stderr)
        try:
            for event in self.events("/chat/completions", body):
                self._status.clear()
                ended = ended or event is DONE or bool(_choice(event).get("finish_reason"))
                text = _text(event)
                self.tokens = _tokens(event) or self.tokens
                if text:
                    yield text
        finally:
            self._status.clear()
        if not ended:
            raise ChatError(f"{self.url} ended its answer early")

    def comment(self, text: str) -> None:
        if PLACE.fullmatch(text):  # others' servers write comments of other kinds
            self._status.show(text)

    def wait(self, pause_s: float, refusal: httpx.Response) -> None:
        end_at, said = monotonic() + pause_s, complaint(refusal)
        while (left_s := end_at - monotonic()) > 0:
            self._status.show(f"asked again in {math.ceil(left_s)} s", said)
            sleep(min(left_s, 1.0))
        self._status.show("asked again", said)

    def _first_model(self) -> str:
        answer = self.ask("GET", "/models")
        if answer.status_code == httpx.codes.NOT_FOUND and not self.url.endswith("/v1"):
            raise ChatError(f"{self.url} has no /models: an OpenAI-compatible server's address ends with /v1")
        try:
            return str(self.checked(answer).json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"{self.url}/models lists no model: name one with --model") from None

    def lost(self, error: Exception) -> ChatError:
        if isinstance(error, httpx.ReadTimeout):
            return ChatError(f"{self.url} has been silent for {SILENCE_S:.0f} s")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return ChatError(f"no server at {self.url} ({one_line(error)}): start one with `alignedserve serve`")
        return ChatError(f"talking to {self.url} failed: {one_line(error)}")

    def refused(self, answer: httpx.Response) -> ChatError:
        said = str(super().refused(answer))
        return (ContextFull if "maximum context length" in said else ChatError)(said)  # as OpenAI, vLLM and we put it


def _choice(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _text(event: dict[str, Any]) -> str:
    delta = _choice(event).get("delta")
    text = delta.get("content") if isinstance(delta, dict) else None
    return text if isinstance(text, str) else ""


def _tokens(event: dict[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of the answer and of prompt and answer together, if this event tells them."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    answer, together = usage.get("completion_tokens"), usage.get("total_tokens")
    return (answer, together) if isinstance(answer, int) and isinstance(together, int) else None
