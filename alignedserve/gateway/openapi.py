"""Our own OpenAPI document: every route with its parameters, body and answers.

The schema of a body is made from the type that checks the body. Some rules concern several fields and are in no
schema: a body that breaks such a rule is refused with 400, which every route names among its answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from alignedserve.gateway.anthropic.errors import PATH as MESSAGES
from alignedserve.gateway.anthropic.types import CountRequest, MessageRequest
from alignedserve.gateway.batches import MOST_LISTED as MOST_BATCHES
from alignedserve.gateway.batches import NewBatch
from alignedserve.gateway.files import EXPIRES_S
from alignedserve.gateway.files import MOST_LISTED as MOST_FILES
from alignedserve.gateway.http.middleware import PUBLIC
from alignedserve.gateway.openai.adapting import LoadAdapter, UnloadAdapter
from alignedserve.gateway.openai.tokenising import DetokenizeRequest, TokenizeRequest
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.responding import MOST_LISTED as MOST_ITEMS
from alignedserve.gateway.responses.types import ResponseRequest
from alignedserve.gateway.vectors.types import EmbeddingRequest, RerankRequest, ScoreRequest

_REF = "#/components/schemas/{model}"
_TEXT, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_NUMBER = {"type": "number"}
_JSON, _EVENTS, _BYTES = "application/json", "text/event-stream", "application/octet-stream"
_PLAIN, _HTML = "text/plain", "text/html"
_TEXTS = _EVENTS, _PLAIN, _HTML


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties, and perhaps others."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_FINISH = _or_null({"type": "string", "enum": ["stop", "length", "tool_calls"]})
_USAGE = _object(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)
_CARD = _object(id=_TEXT, object={"const": "model"}, created=_INTEGER, owned_by=_TEXT, max_model_len=_INTEGER)
_MESSAGE = _object(role={"const": "assistant"}, content=_or_null(_TEXT))
_CHAT_CHOICE = _object(index=_INTEGER, finish_reason=_FINISH, message=_MESSAGE)
_TEXT_CHOICE = _object(index=_INTEGER, finish_reason=_FINISH, text=_TEXT)
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT)))


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _INTEGER, "model": _TEXT}
    return _object(**head, choices=_list(choice), usage=_USAGE)


_CHAT_COMPLETION = _answer("chat.completion", _CHAT_CHOICE)
_TEXT_COMPLETION = _answer("text_completion", _TEXT_CHOICE)
_LIST_HEAD = {"id": _TEXT, "object": {"const": "list"}, "created": _INTEGER, "model": _TEXT}
_PROMPT_USAGE = _object(prompt_tokens=_INTEGER, total_tokens=_INTEGER)
_EMBEDDING = _object(object={"const": "embedding"}, index=_INTEGER, embedding={"anyOf": [_list(_NUMBER), _TEXT]})
_EMBEDDINGS = _object(**_LIST_HEAD, data=_list(_EMBEDDING), usage=_PROMPT_USAGE)
_SCORE = _object(object={"const": "score"}, index=_INTEGER, score=_NUMBER)
_SCORES = _object(**_LIST_HEAD, data=_list(_SCORE), usage=_PROMPT_USAGE)
_RANK = _object(index=_INTEGER, relevance_score=_NUMBER)
_RANKS = _object(id=_TEXT, model=_TEXT, results=_list(_RANK), usage=_PROMPT_USAGE)
_TOKENS = _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_list(_INTEGER))
_FALLEN = _object(part=_TEXT, what=_TEXT, instead=_TEXT)
_FALLBACK = _object(part=_TEXT, what=_TEXT, why=_TEXT, instead=_TEXT)
_PART = _object(name=_TEXT, role=_TEXT, node=_TEXT, address=_TEXT)
_STAGE = _object(stage=_TEXT, part=_TEXT, began_at=_NUMBER, ended_at=_NUMBER, text=_TEXT)
_DECISION = _object(at=_NUMBER, part=_TEXT, attempt=_INTEGER, kind=_TEXT, text=_TEXT)
_TIMELINE = _object(
    **{"class": _TEXT},
    id=_TEXT,
    object={"const": "request.timeline"},
    outcome=_TEXT,
    began_at=_NUMBER,
    ended_at=_or_null(_NUMBER),
    stages=_list(_STAGE),
    decisions=_list(_DECISION),
    displaced=_list(_TEXT),
    silent=_list(_TEXT),
    forgetful=_list(_TEXT),
)
_RESPONSE_HEAD = {"id": _TEXT, "object": {"const": "response"}, "created_at": _INTEGER, "model": _TEXT}
_RESPONSE = _object(**_RESPONSE_HEAD, status=_TEXT, output=_list({"type": "object"}))
_BLOCKS = _list({"type": "object"})
_MESSAGE_HEAD = {"id": _TEXT, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": _TEXT}
_STOPS = {"stop_reason": _or_null(_TEXT), "stop_sequence": _or_null(_TEXT)}
_MESSAGE_USAGE = _object(input_tokens=_INTEGER, output_tokens=_INTEGER)
_MESSAGE_ANSWER = _object(**_MESSAGE_HEAD, content=_BLOCKS, **_STOPS, usage=_MESSAGE_USAGE)
_MESSAGE_ERROR = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))
_FILE_HEAD = {"id": _TEXT, "object": {"const": "file"}, "bytes": _INTEGER, "created_at": _INTEGER, "filename": _TEXT}
_FILE = _object(**_FILE_HEAD, purpose=_TEXT, status=_TEXT)
_BATCH_HEAD = {"id": _TEXT, "object": {"const": "batch"}, "endpoint": _TEXT, "input_file_id": _TEXT, "status": _TEXT}
_BATCH = _object(
    **_BATCH_HEAD,
    completion_window=_TEXT,
    created_at=_INTEGER,
    expires_at=_INTEGER,
    request_counts=_object(total=_INTEGER, completed=_INTEGER, failed=_INTEGER),
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


def _page(record: dict[str, Any]) -> dict[str, Any]:
    ids = {"first_id": _or_null(_TEXT), "last_id": _or_null(_TEXT)}
    return _object(object={"const": "list"}, data=_list(record), has_more=_BOOLEAN, **ids)


def _page_query(most: int) -> tuple[dict[str, Any], ...]:
    """Return the query parameters that choose a page of a list."""
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    order = {"type": "string", "enum": ["asc", "desc"]}
    named = {"limit": limit, "after": _TEXT, "order": order}
    return tuple({"name": name, "in": "query", "schema": schema} for name, schema in named.items())


@dataclass(frozen=True)
class _RouteDocument:
    method: str
    path: str
    about: str  # a sentence that says what it is for
    answer: dict[str, Any]
    body: type[BaseModel] | dict[str, Any] | None = None  # a type for JSON, a schema for a form
    query: tuple[dict[str, Any], ...] = ()
    answer_types: tuple[str, ...] = (_JSON,)


_ROUTES = (
    _RouteDocument(
        "get",
        "/",
        "What runs here, as a page for browsers.",
        _object(name=_TEXT, links=_object()),
        answer_types=(_JSON, _HTML),
    ),
    _RouteDocument("get", "/docs", "This document as a page.", _TEXT, answer_types=(_HTML,)),
    _RouteDocument("get", "/live", "Whether this process answers.", _object(status=_TEXT)),
    _RouteDocument(
        "get",
        "/health",
        "Whether requests are served, and what does not work in any part.",
        _object(status=_TEXT, fallbacks=_list(_FALLEN)),
    ),
    _RouteDocument(
        "get", "/ready", "Whether requests are taken now: not while the server drains.", _object(status=_TEXT)
    ),
    _RouteDocument("get", "/metrics", "Metrics in Prometheus' text form.", _TEXT, answer_types=(_PLAIN,)),
    _RouteDocument(
        "get",
        "/status",
        "The parts that run, how many workers there may be, and how workers keep weights.",
        _object(
            state=_TEXT,
            models=_list(_TEXT),
            parts=_list(_PART),
            late=_list(_object(part=_TEXT, step_s=_NUMBER)),
            scale=_object(),
            fallbacks=_list(_FALLBACK),
            weights=_object(),
        ),
    ),
    _RouteDocument("get", "/version", "The version of AlignedServe.", _object(version=_TEXT)),
    _RouteDocument("get", "/openapi.json", "This document.", {"type": "object"}),
    _RouteDocument(
        "get", "/v1/models", "The models that answer.", _object(object={"const": "list"}, data=_list(_CARD))
    ),
    _RouteDocument("get", "/v1/models/{name}", "One of them.", _CARD),
    _RouteDocument(
        "post", "/v1/load_lora_adapter", "Load an adapter (LoRA).", _TEXT, LoadAdapter, answer_types=(_PLAIN,)
    ),
    _RouteDocument(
        "post", "/v1/unload_lora_adapter", "Unload an adapter.", _TEXT, UnloadAdapter, answer_types=(_PLAIN,)
    ),
    _RouteDocument(
        "post",
        "/v1/chat/completions",
        "The answer to a chat, whole or streamed.",
        _answer("chat.completion", _CHAT_CHOICE),
        ChatRequest,
        answer_types=(_JSON, _EVENTS),
    ),
    _RouteDocument(
        "post",
        "/v1/completions",
        "What follows a text, whole or streamed.",
        _answer("text_completion", _TEXT_CHOICE),
        CompletionRequest,
        answer_types=(_JSON, _EVENTS),
    ),
    _RouteDocument("post", "/v1/embeddings", "A vector of each text.", _EMBEDDINGS, EmbeddingRequest),
    *(
        _RouteDocument("post", path, "A score of each pair of texts.", _SCORES, ScoreRequest)
        for path in ("/v1/score", "/score")
    ),
    *(
        _RouteDocument("post", path, "Documents in the order of their relevance.", _RANKS, RerankRequest)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    _RouteDocument(
        "post", "/v1/responses", "A response, whole or streamed.", _RESPONSE, ResponseRequest, (), (_JSON, _EVENTS)
    ),
    _RouteDocument("get", "/v1/responses/{id}", "A response that was kept.", _RESPONSE),
    _RouteDocument(
        "delete",
        "/v1/responses/{id}",
        "Delete a response.",
        _object(id=_TEXT, object={"const": "response"}, deleted=_BOOLEAN),
    ),
    _RouteDocument("post", "/v1/responses/{id}/cancel", "Cancel a response that runs aside.", _RESPONSE),
    _RouteDocument(
        "get",
        "/v1/responses/{id}/input_items",
        "What a response answered.",
        _page({"type": "object"}),
        query=_page_query(MOST_ITEMS),
    ),
    _RouteDocument(
        "post",
        "/v1/messages",
        "A message in Anthropic's form, whole or streamed.",
        _MESSAGE_ANSWER,
        MessageRequest,
        (),
        (_JSON, _EVENTS),
    ),
    _RouteDocument(
        "post",
        "/v1/messages/count_tokens",
        "How many tokens its prompt has.",
        _object(input_tokens=_INTEGER),
        CountRequest,
    ),
    _RouteDocument(
        "post",
        "/tokenize",
        "The tokens of a prompt or a chat.",
        _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_list(_INTEGER)),
        TokenizeRequest,
    ),
    _RouteDocument("post", "/detokenize", "The text of tokens.", _object(prompt=_TEXT), DetokenizeRequest),
    _RouteDocument(
        "get",
        "/v1/requests/{id}/timeline",
        "Where a request of yours waited, and what was decided about it.",
        {"anyOf": [_TIMELINE, _object(traceEvents=_list({"type": "object"}))]},
        query=({"name": "format", "in": "query", "schema": {"type": "string", "enum": ["json", "text", "perfetto"]}},),
        answer_types=(_JSON, _PLAIN),
    ),
)
_JOB_ROUTES = (
    _RouteDocument("post", "/v1/files", "Upload a file of lines for a batch job.", _FILE, _NEW_FILE),
    _RouteDocument(
        "get",
        "/v1/files",
        "Your files.",
        _page(_FILE),
        query=(*_page_query(MOST_FILES), {"name": "purpose", "in": "query", "schema": _TEXT}),
    ),
    _RouteDocument("get", "/v1/files/{id}", "A file, without its bytes.", _FILE),
    _RouteDocument(
        "delete",
        "/v1/files/{id}",
        "Delete a file.",
        _object(id=_TEXT, object={"const": "file"}, deleted=_BOOLEAN),
    ),
    _RouteDocument(
        "get",
        "/v1/files/{id}/content",
        "The bytes of a file.",
        {"type": "string", "format": "binary"},
        answer_types=(_BYTES,),
    ),
    _RouteDocument("post", "/v1/batches", "Start a batch job.", _BATCH, NewBatch),
    _RouteDocument("get", "/v1/batches", "Your batch jobs.", _page(_BATCH), query=_page_query(MOST_BATCHES)),
    _RouteDocument("get", "/v1/batches/{id}", "A batch job, and how far it is.", _BATCH),
    _RouteDocument("post", "/v1/batches/{id}/cancel", "Cancel a batch job.", _BATCH),
)
_REFUSALS = {
    "400": "what is wrong with the request",
    "401": "a key is needed",
    "403": "the key lacks the scope, or the page is of an origin that is not let in",
    "404": "no such model, request or path",
    "405": "the path does not take this method",
    "408": "the body was too slow",
    "409": "the file is in use, or the batch has ended",
    "413": "the body is too large",
    "415": "the body is compressed, or is not application/json",
    "421": "the server does not answer to this name",
    "429": "a limit is reached, the queue is full, or the first token would be too late",
    "431": "the head is too large",
    "500": "our fault",
    "503": "not ready, draining, or without capacity",
    "507": "no room for files is left",
}


def document(with_jobs: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a deployment with or without batch jobs."""
    routes = (*_ROUTES, *_JOB_ROUTES) if with_jobs else _ROUTES
    kinds = [route.body for route in routes if isinstance(route.body, type)]
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "AlignedServe", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR, "MessageError": _MESSAGE_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: _RouteDocument) -> dict[str, Any]:
    content = {kind: {"schema": _TEXT if kind in _TEXTS else route.answer} for kind in route.answer_types}
    model = "MessageError" if route.path.startswith(MESSAGES) else "Error"
    error = {_JSON: {"schema": {"$ref": _REF.format(model=model)}}}
    refusals = {status: {"description": why, "content": error} for status, why in _REFUSALS.items()}
    responses = {"200": {"description": "the answer", "content": content}, **refusals}
    operation: dict[str, Any] = {"summary": route.about, "responses": responses}
    in_path = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    named = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in in_path]
    if parameters := [*named, *route.query]:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _body_content(route.body)}
    if route.path not in PUBLIC:
        operation["security"] = [{"key": []}, {}]  # a server without keys asks for none
    return operation


def _body_content(body: type[BaseModel] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(body, dict):
        return {"multipart/form-data": {"schema": body}}
    return {_JSON: {"schema": {"$ref": _REF.format(model=body.__name__)}}}
