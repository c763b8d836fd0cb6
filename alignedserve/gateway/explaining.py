"""The route /v1/requests/{id}/timeline: what happened to a request, for the sender's key and no other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from alignedserve.explain.sentences import PriceOf, lines, outcome, said, said_of_stay
from alignedserve.explain.story import Story, request_named
from alignedserve.explain.trace_file import trace_of
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.http.limits import LookPace
from alignedserve.gateway.http.middleware import caller_of
from alignedserve.gateway.openai.errors import invalid, no_such_request
from alignedserve.owner.client import OwnerClient

MOST_NAMES = 4_096  # that clients gave to their requests: this gateway remembers the last ones
MOST_A_MINUTE = 60  # stories that a caller may ask a gateway for: each costs every part a look through its ring


class ExplainRoutes:
    def __init__(self, client: OwnerClient, price_of: PriceOf) -> None:
        self._client, self._price_of = client, price_of
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()  # (caller, the client's name) -> request
        self._asked = LookPace(MOST_A_MINUTE, "timelines", client.now)

    def remember(self, caller: Caller, name: str | None, request: str) -> None:
        """Remember the name that a client, or a proxy before us, has given a request."""
        if name is None:
            return
        self._names[caller.id, name] = request
        if len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    async def timeline(self, http: HttpRequest) -> Response:
        name, form, caller = http.path_params["id"], http.query_params.get("format", "json"), caller_of(http)
        if form not in _FORMS:
            raise invalid(f"format must be {', '.join(_FORMS)}, not {form!r:.40}", "format")
        self._asked.take(caller.id, 1)
        request = self._names.get((caller.id, name)) or request_named(name)
        story = await self._client.story(request)
        if not story.is_of(caller.salt):
            raise no_such_request(name)
        return await asyncio.to_thread(_FORMS[form], story, self._price_of)  # a long one has thousands of steps

    async def of_anybody(self, http: HttpRequest) -> Response:
        """Answer with the story of any caller's request as text, for the live page."""
        self._asked.take(caller_of(http).id, 1)
        name = http.path_params["id"]
        story = await self._client.story(request_named(name))
        if not story.moments:  # no part remembers it
            raise no_such_request(name)
        return await asyncio.to_thread(_text, story, self._price_of)


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
