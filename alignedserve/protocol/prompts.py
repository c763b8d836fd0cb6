"""Choices of one body have the same prompt, and each comes in a frame of its own: a part keeps the prompt once."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.protocol.messages import Prefill, Submit
from alignedserve.protocol.wire import Envelope


class SharedPrompts:
    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()

    def share(self, envelope: Envelope) -> Envelope:
        """Return the envelope, with the prompt of the request before where these are equal."""
        message = envelope.message
        if not isinstance(message, Submit | Prefill):
            return envelope
        request = message.request
        if request.prompt != self._last:
            self._last = request.prompt
            return envelope
        return replace(envelope, message=replace(message, request=replace(request, prompt=self._last)))
