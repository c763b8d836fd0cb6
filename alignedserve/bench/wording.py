"""Writes the prompts of a workload for a server: as token ids, or as messages of plain words.

A workload's tokens are numbers without a meaning. Each run writes them by a table of its own, so no server knows
prompts of an earlier run; prompts that begin alike still do. The next turn of a conversation contains the server's own
answer, so that a server that keeps KV finds the KV again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from alignedserve.bench.answer import StreamedAnswer
from alignedserve.core import Request
from alignedserve.loads.workload import Mixture
from alignedserve.loads.workload.chats import ChatLengths, Message
from alignedserve.loads.workload.tape import VOCABULARY

_FIRST_ID = 100  # ids below are special tokens in many vocabularies; no model has fewer than 1,100 tokens
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force education foot boy age "
    "policy music market sense nation plan college interest death course someone experience behind effect use class "
    "control field development role effort rate heart drug show leader light voice wife"
).split()


@dataclass(frozen=True)
class Prompt:
    path: str  # of the API
    fields: dict[str, Any]  # of the body


def visit_of(request: str) -> str:
    """Return the visit that a request is a turn of: requests are NAME-NUMBER, and NAME-NUMBER.TURN."""
    return request.partition(".")[0]


@dataclass(frozen=True)
class _Said:
    """The conversation so far."""

    num_tokens: int = 0  # of the workload
    words: Sequence[Any] = ()  # token ids, or messages


class Wording(ABC):
    """Writes prompts, and keeps what was said in conversations that go on."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}  # by visit

    @abstractmethod
    def prompt(self, request: Request) -> Prompt: ...

    @abstractmethod
    def heard(self, request: Request, answer: StreamedAnswer) -> tuple[int, ...]:
        """Return the tokens of the answer, as the workload takes them for the next turn."""

    def forget(self, visit: str) -> None:
        """Forget a conversation that has ended."""
        self._said.pop(visit, None)

    def _before(self, request: Request) -> _Said:
        return self._said.get(visit_of(request.id), _Said())

    def _keep(self, request: Request, num_tokens: int, words: Sequence[Any]) -> None:
        self._said[visit_of(request.id)] = _Said(num_tokens, words)


class IdWording(Wording):
    """Prompts as token ids, for /completions: as long as the workload says, to the token."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self._ids = draw.sample(range(_FIRST_ID, _FIRST_ID + VOCABULARY), VOCABULARY)

    def prompt(self, request: Request) -> Prompt:
        said = self._before(request)
        ids = [*said.words, *map(self._ids.__getitem__, request.prompt[said.num_tokens :])]
        self._keep(request, len(request.prompt), ids)
        return Prompt("/completions", {"prompt": ids})

    def heard(self, request: Request, answer: StreamedAnswer) -> tuple[int, ...]:
        tokens = answer.ids or tuple(self._ids[: len(answer.token_at)])  # some tokens, where they are not told
        said = self._before(request)
        self._keep(request, said.num_tokens + len(tokens), [*said.words, *tokens])
        return tokens


class MessageWording(Wording):
    """Prompts as messages, for /chat/completions."""

    @abstractmethod
    def new(self, request: Request, num_said: int) -> list[Message]:
        """Return the messages of the next turn; `num_said` tokens of the workload were said before."""

    def more(self, request: Request) -> dict[str, Any]:
        """Return other fields of the body."""
        return {}

    def prompt(self, request: Request) -> Prompt:
        said = self._before(request)
        messages = [*said.words, *map(asdict, self.new(request, said.num_tokens))]
        self._keep(request, len(request.prompt), messages)
        return Prompt("/chat/completions", {"messages": messages, **self.more(request)})

    def heard(self, request: Request, answer: StreamedAnswer) -> tuple[int, ...]:
        tokens = tuple(range(1, 1 + len(answer.token_at)))
        said = self._before(request)
        self._keep(request, said.num_tokens + len(tokens), [*said.words, asdict(Message("assistant", answer.text))])
        return tokens


class WordWording(MessageWording):
    """Messages of plain words: about a token for each word, and what the server's template adds."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self._words = draw.choices(_WORDS, k=VOCABULARY)

    def new(self, request: Request, num_said: int) -> list[Message]:
        return [Message("user", " ".join(map(self._words.__getitem__, request.prompt[num_said:])))]


class ChatWording(MessageWording):
    """The messages of a file of chats. Its answers end where the model ends them."""

    def __init__(self, chats: ChatLengths) -> None:
        super().__init__()
        self._chats = chats

    def new(self, request: Request, num_said: int) -> list[Message]:
        visit, _, turn = request.id.partition(".")
        chat = self._chats.chat(int(visit.rpartition("-")[2]))
        return list(chat.turns[int(turn or 0)])

    def more(self, request: Request) -> dict[str, Any]:
        return {"max_tokens": request.max_tokens, "ignore_eos": False}


class StreamWordings(Wording):
    """A wording for each stream: chats from files keep their words, all other streams share one wording."""

    def __init__(self, workload: Mixture, usual: Wording) -> None:
        super().__init__()
        sources = {stream.name: stream.lengths for stream in workload.streams}
        self._of_streams: dict[str, Wording] = {
            name: ChatWording(lengths) for name, lengths in sources.items() if isinstance(lengths, ChatLengths)
        }
        self._usual = usual

    def prompt(self, request: Request) -> Prompt:
        return self._of(request.id).prompt(request)

    def heard(self, request: Request, answer: StreamedAnswer) -> tuple[int, ...]:
        return self._of(request.id).heard(request, answer)

    def forget(self, visit: str) -> None:
        self._of(visit).forget(visit)

    def _of(self, request: str) -> Wording:
        return self._of_streams.get(visit_of(request).rpartition("-")[0], self._usual)
