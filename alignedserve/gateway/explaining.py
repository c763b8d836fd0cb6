"""The route /v1/requests/{id}/timeline: what happened to a request, for the sender's key and no other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from alignedserve.explain.sentences import PriceOf, lines, outcome, said, said_of_stay
from alignedserve.explain.story import Story, request_named, without_others
from alignedserve.explain.trace_file import trace_of
from alignedserve.gateway.access.keys import Caller, Scope
from alignedserve.gateway.http.limits import LookPace
from alignedserve.gateway.http.middleware import caller_of
from alignedserve.gateway.http.records import Fault, HttpRecord
from alignedserve.gateway.openai.errors import invalid, no_such_request
from alignedserve.owner.client import DeploymentClient

MOST_NAMES = 4_096  # that clients gave to their requests: this gateway remembers the last ones
_PATH = "/v1/requests/"  # of timelines
MOST_FAULTS = 1_024  # answers that were errors: likewise
MOST_A_MINUTE = 60  # stories that a caller may ask a gateway for: each costs every part a look through its ring


class ExplainRoutes:
    def __init__(self, client: DeploymentClient, price_of: PriceOf) -> None:
        self._client, self._price_of = client, price_of
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()  # (caller, the client's name) -> request
        self._faults: OrderedDict[tuple[str, str], _Refusal] = OrderedDict()  # (caller, request)
        self._asked = LookPace(MOST_A_MINUTE, "timelines", client.now)

    def remember(self, caller: Caller, name: str | None, request: str) -> None:
        """Remember the name that a client, or a proxy before us, has given a request."""
        if name is None:
            return
        self._names[caller.id, name] = request
        if len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    def note_end(self, caller: Caller, record: HttpRecord) -> None:
        """Remember why a request of this caller got an error: where it came to no other part, no other knows it."""
        if (fault := record.fault) is None or record.path.startswith(_PATH):
            return
        self.remember(caller, record.client_id, record.id)
        about, times = f"{record.method} {record.path:.100}", (record.began_at, self._client.now())
        self._faults[caller.id, record.id] = _Refusal(record.id, about, fault, *times)
        if len(self._faults) > MOST_FAULTS:
            self._faults.popitem(last=False)

    async def timeline(self, http: HttpRequest) -> Response:
        name, form, caller = http.path_params["id"], http.query_params.get("format", "json"), caller_of(http)
        if form not in _FORMS:
            raise invalid(f"format must be {', '.join(_FORMS)}, not {form!r:.40}", "format")
        self._asked.take(caller.id, 1)
        request = self._names.get((caller.id, name)) or request_named(name)
        story = await self._client.story(request)
        if not story.is_of(caller.salt):
            if (fault := self._faults.get((caller.id, request))) is None:
                raise no_such_request(name)
            return fault.told(form)
        if Scope.DASHBOARD not in caller.scopes:
            story = without_others(story)
        return await asyncio.to_thread(_FORMS[form], story, self._price_of)  # a long one has thousands of steps

    async def of_anybody(self, http: HttpRequest) -> Response:
        """Answer with the story of any caller's request as text, for the live page."""
        self._asked.take(caller_of(http).id, 1)
        name = http.path_params["id"]
        story = await self._client.story(request_named(name))
        if not story.moments:  # no part remembers it
            raise no_such_request(name)
        return await asyncio.to_thread(_text, story, self._price_of)


class _Refusal(NamedTuple):
    """An answer that was an error, of a request that no part but the gateway knows."""

    request: str
    about: str  # its method and path
    fault: Fault
    began_at: float
    ended_at: float

    def told(self, form: str) -> Response:
        status, code, message, _ = self.fault
        outcome = f"refused with {status}{f' ({code})' if code else ''}: {message}"
        if form == "text":
            return PlainTextResponse(f"{self.request}: {self.about}, {outcome}\n")
        if form == "perfetto":
            raise invalid("it was refused before any part ran it: there is no trace", "format")
        head = {"id": self.request, "object": "request.timeline", "class": None, "outcome": outcome}
        more: dict[str, Any] = {name: [] for name in ("stages", "decisions", "displaced", "silent", "forgetful")}
        return JSONResponse({**head, "began_at": self.began_at, "ended_at": self.ended_at, **more})


def _json(story: Story, price_of: PriceOf) -> Response:
    ended_at = None if story.end is None else story.end.at
    return JSONResponse(
        {
            "id": story.request,
            "object": "request.timeline",
            "class": story.service.value,
            "outcome": outcome(story),
            "began_at": story.began_at,
            "ended_at": ended_at,
            "stages": [
                {
                    "stage": stay.stage.value,
                    "part": stay.part,
                    "began_at": stay.began_at,
                    "ended_at": stay.ended_at,
                    "text": said_of_stay(stay),
                }
                for stay in story.stays
            ],
            "decisions": [
                {
                    "at": moment.decision.at,
                    "part": moment.part,
                    "attempt": moment.decision.attempt,
                    "kind": moment.decision.kind.value,
                    "text": said(moment.decision, price_of),
                }
                for moment in story.moments
            ],
            "displaced": [moment.decision.request for moment in story.displaced],
            "silent": list(story.silent),
            "forgetful": list(story.forgotten_before),
        }
    )


def _text(story: Story, price_of: PriceOf) -> Response:
    return PlainTextResponse("".join(f"{line}\n" for line in lines(story, price_of)))


def _perfetto(story: Story, _: PriceOf) -> Response:
    return Response(trace_of(story), media_type="application/json")


_FORMS: Mapping[str, Callable[[Story, PriceOf], Response]] = {"json": _json, "text": _text, "perfetto": _perfetto}
