"""Requests of one body share their prompt in each part."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Request
from alignedserve.protocol.messages import Prefill, Submit
from alignedserve.protocol.wire import MOST_FRAME_BYTES, Envelope, decode, encode
from alignedserve.shell.links import SharedPrompts
from tests.samples import request


def arrived(prompts: SharedPrompts, *messages: Submit | Prefill) -> list[Request]:
    found = []
    for number, message in enumerate(messages, 1):
        envelope = Envelope("gateway-0", 1, number, message)
        shared = prompts.share(decode(encode(envelope), MOST_FRAME_BYTES))
        assert shared == envelope
        assert isinstance(shared.message, Submit | Prefill)
        found.append(shared.message.request)
    return found


def test_equal_prompts_are_one() -> None:
    body = [request(f"r{number}", prompt=300) for number in range(3)]
    body = [replace(one, prompt=body[0].prompt) for one in body]
    found = arrived(SharedPrompts(), *map(Submit, body), Prefill(body[0]))
    assert len({id(one.prompt) for one in found}) == 1


def test_others_are_what_they_were() -> None:
    one, other = request("a", prompt=300), replace(request("b"), prompt=(1, 2, 3))
    found = arrived(SharedPrompts(), Submit(one), Submit(other), Submit(one))
    assert [each.prompt for each in found] == [one.prompt, other.prompt, one.prompt]
