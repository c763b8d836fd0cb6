"""What goes into a step: tokens that the plan names, and ones that the step before it has sampled and nobody has read.

plan of step N + 1    7    None    12    None
                      │     ▲      │      ▲
                      │     │      │      │        on the device
step N  sampled             31            5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from alignedserve.core import StepResult
from alignedserve.errors import PlanError
from alignedserve.kernels.common.placing import on_device, put


@dataclass(frozen=True)
class Unread:
    """Sampled tokens on the device: row by row, less than 0 where none could be sampled."""

    tokens: torch.Tensor
    rows: Mapping[str, int]  # of each request


class Before:
    """The step before: which token each of its requests goes on from."""

    def __init__(self, known: Mapping[str, int], unsampled: Sequence[str] = (), unread: Unread | None = None) -> None:
        self._known, self._unread = known, unread
        self._unsampled = frozenset(unsampled)

    @classmethod
    def of(cls, result: StepResult) -> Before:
        return cls(dict(result.tokens), result.unsampled)

    @classmethod
    def unread(cls, tokens: torch.Tensor, requests: Sequence[str]) -> Before:
        """A row of each of these."""
        return cls({}, (), Unread(tokens, {request: row for row, request in enumerate(requests)}))

    def row(self, request: str) -> int | None:
        """Where its token is, if it is still on the device alone."""
        return None if self._unread is None else self._unread.rows.get(request)

    def ended(self, request: str) -> bool:
        """As no token could be sampled for it: what was planned ahead for it is in vain."""
        return request in self._unsampled

    def token(self, request: str) -> int:
        """Waits for it, where nobody has read it yet."""
        if (row := self.row(request)) is not None:
            assert self._unread is not None, "a row is that of an unread token"
            return max(0, int(self._unread.tokens[row]))
        if request not in self._known:
            raise PlanError(f"request {request} is to go on from the step before, which sampled nothing for it")
        return self._known[request]

    def inputs(self, tokens: Sequence[int], rows: Mapping[int, int]) -> Inputs:
        """Of a step: its tokens, and which of them are in these rows of the step before."""
        return Inputs(tokens, rows, None if self._unread is None else self._unread.tokens)


NOTHING = Before({})


@dataclass(frozen=True)
class Inputs:
    tokens: Sequence[int]
    rows: Mapping[int, int]  # place among the tokens -> row of what is unread
    unread: torch.Tensor | None

    def put(self, out: torch.Tensor) -> None:
        """There, without waiting for the device."""
        put(out, torch.tensor(self.tokens, dtype=torch.long))
        if self.rows and self.unread is not None:
            places, rows = on_device(torch.tensor([[*self.rows], [*self.rows.values()]]), out.device)
            out.index_copy_(0, places, self.unread.index_select(0, rows).clamp(min=0))

    def placed(self, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and not self.rows:
            return torch.tensor(self.tokens, dtype=torch.long)
        out = torch.empty(len(self.tokens), dtype=torch.long, device=device)
        self.put(out)
        return out
