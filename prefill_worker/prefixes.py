"""Prompts that begin as others did: what the pool still has of their beginning is not computed again.

    Prefill ─▶ asking ── Prefix ──▶ waiting ──▶ fetching ── CopiedIn ──▶ running, from the first unknown token on
                  └── no answer ──▶            (seated)        └── not intact ──▶ running, from its first token on

The pool holds the pages for the attempt until its Commit names them or a Release lets them go.
"""

from __future__ import annotations

from alignedserve.protocol.messages import AskPrefix, Prefix
from alignedserve.worker.page_writer import PageNames
from alignedserve.worker.step.running import Running


class Prefixes:
    def __init__(self, page_size: int, names: PageNames) -> None:
        self._page_size, self._names = page_size, names
        self._asking: dict[str, Running] = {}
        self._unanswered: set[str] = set()  # of them, since the last look: who is here at the next one goes on without

    def __len__(self) -> int:
        return len(self._asking)

    @property
    def asking(self) -> list[Running]:
        return list(self._asking.values())

    def ask(self, running: Running) -> AskPrefix | None:
        """None where no whole page comes before the last token, whose logits are needed in any case, or where those of
        all tokens are."""
        if running.request.sampling.prompt_logprobs is not None:
            return None
        names = self._names.pages_of(running, running.num_tokens - 1)
        if not names:
            return None
        self._asking[running.request.id] = running
        return AskPrefix(*running.key, names, running.request.service)

    def answered(self, prefix: Prefix) -> Running | None:
        """The prompt that may go on, with what is known of it."""
        running = self._asking.get(prefix.request)
        if running is None or running.key != (prefix.request, prefix.attempt):
            return None
        running.known = prefix.pages
        return self._leave(prefix.request)

    def drop(self, request: str, attempt: int) -> Running | None:
        running = self._asking.get(request)
        return self._leave(request) if running is not None and running.is_of(request, attempt) else None

    def give_up(self) -> list[Running]:
        """All: there is nobody to answer."""
        return [self._leave(request) for request in list(self._asking)]

    def overdue(self) -> list[Running]:
        """Those that were asking at the last look already: the ask or its answer was lost."""
        late = [self._leave(request) for request in list(self._asking) if request in self._unanswered]
        self._unanswered = set(self._asking)
        return late

    def tokens_in(self, pages: tuple[int, ...]) -> int:
        return len(pages) * self._page_size

    def _leave(self, request: str) -> Running:
        self._unanswered.discard(request)
        return self._asking.pop(request)
