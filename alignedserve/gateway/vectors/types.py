"""The bodies that ask for vectors: OpenAI's fields, vLLM's, Jina's and Cohere's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.strict import ListOf, Strict, fault
from alignedserve.gateway.openai.types import PromisedRequest, Prompt, TokenId, kind_of_prompts

MOST_INPUTS = 2048  # of a body, as for OpenAI
MOST_DIMENSIONS = 1 << 20
_INT32 = 2**31

Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[ListOf[TokenId], Field(min_length=1), Tag("ids")]
    | Annotated[ListOf[Prompt], Field(min_length=1, max_length=MOST_INPUTS), Tag("several")],
    Discriminator(kind_of_prompts),
]
Texts = str | Annotated[ListOf[str], Field(min_length=1, max_length=MOST_INPUTS)]


class VectorRequest(PromisedRequest):
    """The fields that all bodies for vectors have in common."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=_INT32)  # -1: to what the model can read

    def faults(self) -> Iterator[PydanticCustomError]:
        if self.truncate_prompt_tokens == 0:
            yield fault("truncate_prompt_tokens", "must be -1, for as many tokens as the model reads, or above 0")


class EmbeddingRequest(VectorRequest):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MOST_DIMENSIONS)
    add_special_tokens: bool | None = None
    prompt_name: str | None = None  # of the folder's prompts: which of them begins each text

    @property
    def inputs(self) -> list[str | list[int]]:
        if kind_of_prompts(self.input) == "several":
            return cast("list[str | list[int]]", self.input)
        return [cast("str | list[int]", self.input)]


class ScoreRequest(VectorRequest):
    """Pairs of texts, by vLLM's names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    items: Texts | None = None

    def faults(self) -> Iterator[PydanticCustomError]:
        yield from super().faults()
        named = [name for name in ("text_1", "text_2", "queries", "items") if getattr(self, name) is not None]
        if named not in (["text_1", "text_2"], ["queries", "items"]):
            yield fault("text_1", "there must be text_1 and text_2, or queries and items")
        first, second = (_listed(getattr(self, name)) for name in named)
        if len(first) not in (1, len(second)):
            yield fault(named[0], f"has {len(first)} texts and {named[1]} has {len(second)}: one text, or as many")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = _listed(self.text_1 or self.queries or ""), _listed(self.text_2 or self.items or "")
        return [*zip(first * len(second) if len(first) == 1 else first, second, strict=True)]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Document(Strict):
    text: str


def _kind_of_document(document: Any) -> str:
    return "text" if isinstance(document, str) else "object"


AnyDocument = Annotated[
    Annotated[str, Tag("text")] | Annotated[Document, Tag("object")], Discriminator(_kind_of_document)
]


class RerankRequest(VectorRequest):
    """A query and documents, by the names of Jina and Cohere."""

    query: str
    documents: Annotated[ListOf[AnyDocument], Field(min_length=1, max_length=MOST_INPUTS)]
    top_n: int | None = Field(None, ge=0, lt=_INT32)  # 0: all
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self.texts]
