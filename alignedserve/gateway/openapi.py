"""Our own OpenAPI document: every route, what it takes and what it answers.

What is taken is read from the very types that check it. Some rules go across fields and are in no schema: a body that
breaks one is refused with 400, which every route that takes a body names among its answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from alignedserve.gateway.batches import MOST_LISTED as MOST_BATCHES
from alignedserve.gateway.batches import NewBatch
from alignedserve.gateway.files import EXPIRES_S
from alignedserve.gateway.files import MOST_LISTED as MOST_FILES
from alignedserve.gateway.http.middleware import PROBES
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.tokenising import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_TEXT, _WHOLE, _IS = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_JSON, _EVENTS, _PLAIN, _BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"


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


_PART = _object(name=_TEXT, role=_TEXT, node=_TEXT, address=_TEXT)
_FILE_HEAD = {"id": _TEXT, "object": {"const": "file"}, "bytes": _WHOLE, "created_at": _WHOLE, "filename": _TEXT}
_FILE = _object(**_FILE_HEAD, purpose=_TEXT, status=_TEXT)
_BATCH_HEAD = {"id": _TEXT, "object": {"const": "batch"}, "endpoint": _TEXT, "input_file_id": _TEXT, "status": _TEXT}
_BATCH = _object(
    **_BATCH_HEAD,
    completion_window=_TEXT,
    created_at=_WHOLE,
    expires_at=_WHOLE,
    request_counts=_object(total=_WHOLE, completed=_WHOLE, failed=_WHOLE),
)
_NEW_FILE = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRES_S[0], "maximum": EXPIRES_S[1]},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}


def _page(of: dict[str, Any]) -> dict[str, Any]:
    ids = {"first_id": _or_null(_TEXT), "last_id": _or_null(_TEXT)}
    return _object(object={"const": "list"}, data=_list(of), has_more=_IS, **ids)


def _paged(most: int) -> tuple[dict[str, Any], ...]:
    """What a list may be asked for."""
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    order = {"type": "string", "enum": ["asc", "desc"]}
    named = {"limit": limit, "after": _TEXT, "order": order}
    return tuple({"name": name, "in": "query", "schema": schema} for name, schema in named.items())


@dataclass(frozen=True)
class _Route:
    method: str
    path: str
    answer: dict[str, Any]
    takes: type[BaseModel] | dict[str, Any] | None = None  # as JSON, or as a form
    query: tuple[dict[str, Any], ...] = ()
    says: tuple[str, ...] = (_JSON,)  # in which form it answers


_ROUTES = (
    _Route("get", "/health", _object(status=_TEXT)),
    _Route("get", "/ready", _object(status=_TEXT)),
    _Route("get", "/metrics", _TEXT, says=(_PLAIN,)),
    _Route("get", "/status", _object(state=_TEXT, models=_list(_TEXT), parts=_list(_PART), scale=_object())),
    _Route("get", "/version", _object(version=_TEXT)),
    _Route("get", "/openapi.json", {"type": "object"}),
    _Route("get", "/v1/models", _object(object={"const": "list"}, data=_list(_CARD))),
    _Route("get", "/v1/models/{name}", _CARD),
    _Route("post", "/v1/chat/completions", _answer("chat.completion", _CHAT_CHOICE), ChatRequest, (), (_JSON, _EVENTS)),
    _Route(
        "post", "/v1/completions", _answer("text_completion", _TEXT_CHOICE), CompletionRequest, (), (_JSON, _EVENTS)
    ),
    _Route("post", "/tokenize", _object(count=_WHOLE, max_model_len=_WHOLE, tokens=_list(_WHOLE)), TokenizeRequest),
    _Route("post", "/detokenize", _object(prompt=_TEXT), DetokenizeRequest),
)
_OF_JOBS = (
    _Route("post", "/v1/files", _FILE, _NEW_FILE),
    _Route(
        "get",
        "/v1/files",
        _page(_FILE),
        query=(*_paged(MOST_FILES), {"name": "purpose", "in": "query", "schema": _TEXT}),
    ),
    _Route("get", "/v1/files/{id}", _FILE),
    _Route("delete", "/v1/files/{id}", _object(id=_TEXT, object={"const": "file"}, deleted=_IS)),
    _Route("get", "/v1/files/{id}/content", {"type": "string", "format": "binary"}, says=(_BYTES,)),
    _Route("post", "/v1/batches", _BATCH, NewBatch),
    _Route("get", "/v1/batches", _page(_BATCH), query=_paged(MOST_BATCHES)),
    _Route("get", "/v1/batches/{id}", _BATCH),
    _Route("post", "/v1/batches/{id}/cancel", _BATCH),
)
_REFUSALS = {
    "400": "what is wrong with the request",
    "401": "a key is needed",
    "403": "the key lacks the scope",
    "404": "no such model or path",
    "405": "the path does not take this method",
    "408": "the body was too slow",
    "409": "the file is in use, or the batch has ended",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "a limit is reached, or the queue is full",
    "431": "the head is too large",
    "500": "our fault",
    "503": "not ready, draining, or without capacity",
    "507": "no room for files is left",
}


def document(with_jobs: bool) -> dict[str, Any]:
    routes = (*_ROUTES, *_OF_JOBS) if with_jobs else _ROUTES
    kinds = [route.takes for route in routes if isinstance(route.takes, type)]
    _, taken = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "AlignedServe", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**taken["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: _Route) -> dict[str, Any]:
    content = {kind: {"schema": _TEXT if kind == _EVENTS else route.answer} for kind in route.says}
    error = {_JSON: {"schema": {"$ref": _REF.format(model="Error")}}}
    refusals = {status: {"description": why, "content": error} for status, why in _REFUSALS.items()}
    operation: dict[str, Any] = {"responses": {"200": {"description": "the answer", "content": content}, **refusals}}
    in_path = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    named = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in in_path]
    if parameters := [*named, *route.query]:
        operation["parameters"] = parameters
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _body(route.takes)}
    if route.path not in PROBES:
        operation["security"] = [{"key": []}, {}]  # a server without keys needs none
    return operation


def _body(takes: type[BaseModel] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(takes, dict):
        return {"multipart/form-data": {"schema": takes}}
    return {_JSON: {"schema": {"$ref": _REF.format(model=takes.__name__)}}}
