"""The embedding model beside the served one, as a gateway and the job runner see it: a deployment with an owner of its
own, whose router has the name that every router has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from alignedserve.architectures.vectors import read_pooled
from alignedserve.core import Role
from alignedserve.explain.story import Story
from alignedserve.owner.client import OwnerClient
from alignedserve.owner.shell import Owner
from alignedserve.protocol.messages import ROUTER, Figures, Member
from alignedserve.shell.part import Part
from alignedserve.text.text_model import TextModel

ROUTER_NAME = f"{ROUTER}-embed"  # of its router, where both are named


@dataclass(frozen=True)
class VectorModel:
    """A model that makes vectors, and the owner of requests for it."""

    name: str
    client: OwnerClient
    text: TextModel
    max_model_len: int
    at_once: int  # requests of a body that run at once

    @property
    def longest(self) -> int:
        """The most tokens of a text: an encoder may have learnt to read fewer than it has places for."""
        told = None if self.text.pooled is None else self.text.pooled.longest
        return min(told or self.max_model_len, self.max_model_len)


class BothSides:
    """Both deployments as one, for what tells who is there and what became of a request."""

    def __init__(self, served: OwnerClient, embed: OwnerClient) -> None:
        self._served, self._both = served, (served, embed)
        self.name, self.now = served.name, served.now

    @property
    def ready(self) -> bool:
        return all(side.ready for side in self._both)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple({member.name: member for side in reversed(self._both) for member in side.members}.values())

    @property
    def late(self) -> Mapping[str, float]:
        return {**self._both[1].late, **self._served.late}

    async def story(self, request: str) -> Story:
        told = await self._served.story(request)
        return told if told.moments else await self._both[1].story(request)


class EmbedOwner(Owner):
    @property
    def members(self) -> tuple[Member, ...]:
        found = super().members
        return tuple(replace(member, name=ROUTER_NAME) if member.role is Role.ROUTER else member for member in found)


def embedding_model(
    part: Part, hear: Callable[[Figures, str], None] = lambda *_: None
) -> tuple[VectorModel, EmbedOwner] | None:
    """Return the embedding model of this part's deployment, if it has one, and the owner of its requests, which is to
    be run. `hear` is told what its parts tell, and the model's name."""
    if part.spec.embed is None:
        return None
    side = Part(part.spec.on_side(part.spec.embed))
    model, capacity = side.capacity()
    text = replace(TextModel.load(side.folder), pooled=read_pooled(side.folder, model))
    owner, name = EmbedOwner(side), str(side.config.served_model_name)

    def told(figures: Figures) -> None:
        hear(replace(figures, member=ROUTER_NAME) if figures.member == ROUTER else figures, name)

    owner.on_figures = told
    at_once = max(1, capacity.limits.max_batch // 2)
    return VectorModel(name, owner, text, capacity.max_model_len, at_once), owner
