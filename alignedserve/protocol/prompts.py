"""Choices of one body share prompt and rules, and each choice comes in its own frame: a part keeps prompt and rules
once, or a body of some kilobytes with many choices would take megabytes."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Choice, Request, Sampling
from alignedserve.protocol.messages import Prefill, Submit
from alignedserve.protocol.wire import Envelope


class SharedPrompts:
    def __init__(self) -> None:
        self._prompt: tuple[int, ...] = ()
        self._stop_tokens: tuple[int, ...] = ()
        self._rules: Sampling | None = None  # the last rules that may be long

    def share(self, envelope: Envelope) -> Envelope:
        """Return the envelope; fields that equal those of the request before share its objects."""
        message = envelope.message
        if not isinstance(message, Submit | Prefill):
            return envelope
        shared = self._shared(message.request)
        return envelope if shared is message.request else replace(envelope, message=replace(message, request=shared))

    def _shared(self, request: Request) -> Request:
        if request.prompt == self._prompt:
            request = replace(request, prompt=self._prompt)
        if request.stop_tokens == self._stop_tokens:
            request = replace(request, stop_tokens=self._stop_tokens)
        self._prompt, self._stop_tokens = request.prompt, request.stop_tokens
        own, last = request.sampling, self._rules
        if own.logit_bias or own.allowed_tokens or own.grammar is not None or own.syntax:
            if last is not None and _rules(own) == _rules(last):
                bias, allowed, grammar, syntax = _rules(last)
                own = replace(own, logit_bias=bias, allowed_tokens=allowed, grammar=grammar, syntax=syntax)
                request = replace(request, sampling=own)
            self._rules = own
        return request


def _rules(of: Sampling) -> tuple[tuple[tuple[int, float], ...], bytes, Choice | None, str]:
    return of.logit_bias, of.allowed_tokens, of.grammar, of.syntax
