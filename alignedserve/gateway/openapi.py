"""Our own OpenAPI document: the routes for tokens, what they take and what they answer.

What is taken is read from the very types that check it. Some rules go across fields and are in no schema: a body that
breaks one is refused with 400, which every route that takes a body names among its answers.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from alignedserve.gateway.openai_types import ChatRequest, CompletionRequest
from alignedserve.gateway.tokenising import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}


def _object(**properties: Any) -> dict[str, Any]:
    """All of which are there; others may be."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _or_null(*of: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*of, {"type": "null"}]}


_FINISH = _or_null({"type": "string", "enum": ["stop", "length", "tool_calls"]})
_USAGE = _object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE)
_CARD = _object(id=_TEXT, object={"const": "model"}, created=_WHOLE, owned_by=_TEXT, max_model_len=_WHOLE)
_MESSAGE = _object(role={"const": "assistant"}, content=_or_null(_TEXT))
_CHAT_CHOICE = _object(index=_WHOLE, finish_reason=_FINISH, message=_MESSAGE)
_TEXT_CHOICE = _object(index=_WHOLE, finish_reason=_FINISH, text=_TEXT)
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT)))


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _WHOLE, "model": _TEXT}
    return _object(**head, choices=_list(choice), usage=_USAGE)


# method, path, what it takes, what it answers, whether it may stream
_ROUTES: tuple[tuple[str, str, type[BaseModel] | None, dict[str, Any], bool], ...] = (
    ("get", "/health", None, _object(status=_TEXT), False),
    ("get", "/ready", None, _object(status=_TEXT), False),
    ("get", "/version", None, _object(version=_TEXT), False),
    ("get", "/v1/models", None, _object(object={"const": "list"}, data=_list(_CARD)), False),
    ("post", "/v1/chat/completions", ChatRequest, _answer("chat.completion", _CHAT_CHOICE), True),
    ("post", "/v1/completions", CompletionRequest, _answer("text_completion", _TEXT_CHOICE), True),
    ("post", "/tokenize", TokenizeRequest, _object(count=_WHOLE, max_model_len=_WHOLE, tokens=_list(_WHOLE)), False),
    ("post", "/detokenize", DetokenizeRequest, _object(prompt=_TEXT), False),
)
_REFUSALS = {
    "400": "what is wrong with the request",
    "401": "a key is needed",
    "403": "the key lacks the scope",
    "404": "no such model or path",
    "405": "the path does not take this method",
    "408": "the body was too slow",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "a limit is reached, or the queue is full",
    "431": "the head is too large",
    "500": "our fault",
    "503": "not ready, draining, or without capacity",
}
_OPEN = ("/health", "/ready")


def document() -> dict[str, Any]:
    kinds = [route[2] for route in _ROUTES if route[2] is not None]
    _, taken = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    paths: dict[str, Any] = {}
    for method, path, kind, answer, streams in _ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, kind, answer, streams)
    return {
        "openapi": "3.1.0",
        "info": {"title": "AlignedServe", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**taken["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, kind: type[BaseModel] | None, answer: dict[str, Any], streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": _TEXT}
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    refusals = {status: {"description": why, "content": error} for status, why in _REFUSALS.items()}
    operation: dict[str, Any] = {"responses": {"200": {"description": "the answer", "content": content}, **refusals}}
    if kind is not None:
        schema = {"$ref": _REF.format(model=kind.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path not in _OPEN:
        operation["security"] = [{"key": []}, {}]  # a server without keys needs none
    return operation
