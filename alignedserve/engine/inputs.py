"""The input tokens of a step: the plan names them, or the step before has sampled them and the CPU has not read them.

plan of step N + 1    7    None    12    None
                      │     ▲      │      ▲
                      │     │      │      │        on the device
step N  sampled             31            5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignedserve.core import StepResult
from alignedserve.errors import PlanError
from alignedserve.kernels.common.placing import Section, on_device, put


@dataclass(frozen=True)
class Unread:
    """Sampled tokens that only the device has, one row per request; below 0 where no token could be sampled."""

    tokens: Tensor
    rows: Mapping[str, int]  # request -> row


class Before:
    """The tokens that the step before has sampled: each request continues from its own token."""

    def __init__(self, known: Mapping[str, int], unsampled: Sequence[str] = (), unread: Unread | None = None) -> None:
        self._known, self._unread = known, unread
        self._unsampled = frozenset(unsampled)

    @classmethod
    def from_result(cls, result: StepResult) -> Before:
        return cls(dict(result.tokens), result.unsampled)

    @classmethod
    def from_device(cls, tokens: Tensor, requests: Sequence[str]) -> Before:
        """Build it from tokens that are not read yet: one row per request, in this order."""
        return cls({}, (), Unread(tokens, {request: row for row, request in enumerate(requests)}))

    def row(self, request: str) -> int | None:
        """Return the row of the request's token, if only the device has it."""
        return None if self._unread is None else self._unread.rows.get(request)

    def ended(self, request: str) -> bool:
        """Return whether the request has ended because no token could be sampled: planned decodes are dropped then."""
        return request in self._unsampled

    def token(self, request: str) -> int:
        """Return the request's token; wait for the device if the token is not read yet."""
        if (row := self.row(request)) is not None:
            assert self._unread is not None, "a row is that of an unread token"
            return max(0, int(self._unread.tokens[row]))
        if request not in self._known:
            raise PlanError(f"request {request} is to go on from the step before, which sampled nothing for it")
        return self._known[request]

    def inputs(self, tokens: Sequence[int], rows: Mapping[int, int]) -> Inputs:
        """Return a step's inputs; `rows` maps places among its tokens to rows of the step before."""
        return Inputs(tokens, rows, None if self._unread is None else self._unread.tokens)


NOTHING = Before({})


@dataclass(frozen=True)
class Inputs:
    tokens: Sequence[int]
    rows: Mapping[int, int]  # place among the tokens -> row of `unread`
    unread: Tensor | None

    def fill(self, tokens: Section, sources: Section, known: int) -> None:
        """Fill the sections of a captured step: tokens, and rows of the step before; `known` is the row of others."""
        tokens.fill(self.tokens)
        rows = [known] * len(self.tokens)
        for place, row in self.rows.items():
            rows[place] = row
        sources.fill(rows, known)

    def put(self, out: Tensor) -> None:
        """Write the tokens to `out` without waiting for the device."""
        put(out, torch.tensor(self.tokens, dtype=torch.long))
        if self.rows and self.unread is not None:
            places, rows = on_device(torch.tensor([[*self.rows], [*self.rows.values()]]), out.device)
            out.index_copy_(0, places, self.unread.index_select(0, rows).clamp(min=0))

    def placed(self, device: torch.device) -> Tensor:
        """Return the tokens as a tensor on the device."""
        if device.type == "cpu" and not self.rows:
            return torch.tensor(self.tokens, dtype=torch.long)
        out = torch.empty(len(self.tokens), dtype=torch.long, device=device)
        self.put(out)
        return out
