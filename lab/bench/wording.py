"""Writes the prompts of a workload for a server: as token ids, or as messages of plain words.

A workload's tokens are numbers without a meaning. Each run writes them by a table of its own, so no server knows
prompts of an earlier run; prompts that begin alike still do. The next turn of a conversation contains the server's own
answer, so that a server that keeps KV finds the KV again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from random import Random
from typing import Any, TypeAlias

from alignedserve.core import Request
from alignedserve.lab.bench.answer import StreamedAnswer
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.loads.workload.files import ChatLengths, Message
from alignedserve.lab.loads.workload.tape import VOCABULARY

_FIRST_ID = 100  # ids below are special tokens in many vocabularies; no model has fewer than 1,100 tokens
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force education foot boy age "
    "policy music market sense nation plan college interest death course someone experience behind effect use class "
    "control field development role effort rate heart drug show leader light voice wife"
).split()


def visit_of(request: str) -> str:
    """Return the visit that a request is a turn of: requests are NAME-NUMBER, and NAME-NUMBER.TURN."""
    return request.partition(".")[0]


class Wording(ABC):
    """Writes prompts, and keeps what was said in conversations that go on."""

    path = "/chat/completions"  # of the API
    field = "messages"  # of the body, which has the words

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, list[Any]]] = {}  # visit -> tokens of the workload, and their words

    @abstractmethod
    def new(self, request: Request, num_said: int) -> Iterable[Any]:
        """Return the words of the next turn; `num_said` tokens of the workload were said before."""

    @abstractmethod
    def answered(self, answer: StreamedAnswer) -> tuple[tuple[int, ...], Sequence[Any]]:
        """Return the tokens of an answer, as the workload takes them for the next turn, and its words."""

    def more(self, request: Request) -> dict[str, Any]:
        """Return other fields of the body."""
        return {}

    def prompt(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Return the path of the API that takes the prompt, and the fields of the body."""
        num_said, words = self._said.get(visit_of(request.id), (0, []))
        words = [*words, *self.new(request, num_said)]
        self._said[visit_of(request.id)] = len(request.prompt), words
        return self.path, {self.field: words, **self.more(request)}

    def heard(self, request: Request, answer: StreamedAnswer) -> tuple[int, ...]:
        """Keep the answer for the next turn, and return its tokens."""
        tokens, words = self.answered(answer)
        num_said, before = self._said[visit_of(request.id)]
        self._said[visit_of(request.id)] = num_said + len(tokens), [*before, *words]
        return tokens

    def forget(self, visit: str) -> None:
        """Forget a conversation that has ended."""
        self._said.pop(visit, None)


class IdWording(Wording):
    """Prompts as token ids: as long as the workload says, to the token."""

    path, field = "/completions", "prompt"

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self._ids = draw.sample(range(_FIRST_ID, _FIRST_ID + VOCABULARY), VOCABULARY)

    def new(self, request: Request, num_said: int) -> Iterable[int]:
        return map(self._ids.__getitem__, request.prompt[num_said:])

    def answered(self, answer: StreamedAnswer) -> tuple[tuple[int, ...], Sequence[int]]:
        tokens = answer.ids or tuple(self._ids[: len(answer.token_at)])  # some tokens, where they are not told
        return tokens, tokens


class MessageWording(Wording):
    """Prompts as messages."""

    def answered(self, answer: StreamedAnswer) -> tuple[tuple[int, ...], Sequence[dict[str, Any]]]:
        return tuple(range(1, 1 + len(answer.token_at))), [asdict(Message("assistant", answer.text))]


class WordWording(MessageWording):
    """Messages of plain words: about a token for each word, and what the server's template adds."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self._words = draw.choices(WORDS, k=VOCABULARY)

    def new(self, request: Request, num_said: int) -> Iterable[dict[str, Any]]:
        return [asdict(Message("user", " ".join(map(self._words.__getitem__, request.prompt[num_said:]))))]


class ChatWording(MessageWording):
    """The messages of a file of chats. Its answers end where the model ends them."""

    def __init__(self, chats: ChatLengths) -> None:
        super().__init__()
        self._chats = chats

    def new(self, request: Request, num_said: int) -> Iterable[dict[str, Any]]:
        visit, _, turn = request.id.partition(".")
        return map(asdict, self._chats.chat(int(visit.rpartition("-")[2])).turns[int(turn or 0)])

    def more(self, request: Request) -> dict[str, Any]:
        return {"max_tokens": request.max_tokens, "ignore_eos": False}


class StreamWordings:
    """A wording for each stream: chats from files keep their words, all other streams share one wording."""

    def __init__(self, workload: Mixture, usual: Wording) -> None:
        sources = {stream.name: stream.lengths for stream in workload.streams}
        chats = {name: lengths for name, lengths in sources.items() if isinstance(lengths, ChatLengths)}
        self._of_streams, self._usual = {name: ChatWording(lengths) for name, lengths in chats.items()}, usual

    def prompt(self, request: Request) -> tuple[str, dict[str, Any]]:
        return self._of(request.id).prompt(request)

    def heard(self, request: Request, answer: StreamedAnswer) -> tuple[int, ...]:
        return self._of(request.id).heard(request, answer)

    def forget(self, visit: str) -> None:
        self._of(visit).forget(visit)

    def _of(self, request: str) -> Wording:
        return self._of_streams.get(visit_of(request).rpartition("-")[0], self._usual)


AnyWording: TypeAlias = Wording | StreamWordings
