"""Our own OpenAPI document: every route with its parameters, body and answers.

The schema of a body is made from the type that checks the body. Some rules concern several fields and are in no
schema: a body that breaks such a rule is refused with 400, which every route names among its answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from alignedserve.gateway.anthropic.types import CountRequest, MessageRequest
from alignedserve.gateway.batches import MOST_LISTED as MOST_BATCHES
from alignedserve.gateway.batches import NewBatch
from alignedserve.gateway.files import EXPIRES_S
from alignedserve.gateway.files import MOST_LISTED as MOST_FILES
from alignedserve.gateway.http.error_responses import MESSAGES
from alignedserve.gateway.http.middleware import PUBLIC
from alignedserve.gateway.openai.adapting import LoadAdapter, UnloadAdapter
from alignedserve.gateway.openai.tokenising import DetokenizeRequest, TokenizeRequest
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.responding import MOST_LISTED as MOST_ITEMS
from alignedserve.gateway.responses.types import ResponseRequest
from alignedserve.gateway.vectors.types import EmbeddingRequest, RerankRequest, ScoreRequest

_REF = "#/components/schemas/{model}"
_JSON, _EVENTS, _BYTES = "application/json", "text/event-stream", "application/octet-stream"
_PLAIN, _HTML = "text/plain", "text/html"
_TEXTS = _EVENTS, _PLAIN, _HTML
_STREAMED = _JSON, _EVENTS
_TEXT, _ANY = {"type": "string"}, {"type": "object"}


def _type(words: str) -> dict[str, Any]:
    """Return the schema of `integer`, `list of number`, `string or null`."""
    if words.endswith(" or null"):
        return {"anyOf": [_type(words.removesuffix(" or null")), {"type": "null"}]}
    if words.startswith("list of "):
        return _list(_type(words.removeprefix("list of ")))
    return {"type": words}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(fields: str = "", **nested: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all of these fields, and perhaps others.

    `id, created: integer, object = list`: a text, a number, a constant."""
    properties: dict[str, Any] = {}
    for field in filter(None, fields.split(", ")):
        name, is_constant, value = field.partition(" = ")
        name, _, words = name.partition(": ")
        properties[name] = {"const": value} if is_constant else _type(words or "string")
    properties |= nested
    return {"type": "object", "properties": properties, "required": list(properties)}


_FINISH = {"anyOf": [{"type": "string", "enum": ["stop", "length", "tool_calls"]}, {"type": "null"}]}
_USAGE = _object("prompt_tokens: integer, completion_tokens: integer, total_tokens: integer")
_PROMPT_USAGE = _object("prompt_tokens: integer, total_tokens: integer")
_CARD = _object("id, object = model, created: integer, owned_by, max_model_len: integer")
_ERROR = _object(error=_object("message, type, param: string or null, code: string or null"))
_HEAD = "id, created: integer, model, object"


def _answer(kind: str, **more: dict[str, Any]) -> dict[str, Any]:
    choice = _object("index: integer", finish_reason=_FINISH, **more)
    return _object(f"{_HEAD} = {kind}", choices=_list(choice), usage=_USAGE)


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    return _object(f"{_HEAD} = list", data=_list(record), usage=_PROMPT_USAGE)


_CHAT = _answer("chat.completion", message=_object("role = assistant, content: string or null"))
_EMBEDDING = {"anyOf": [_type("list of number"), _TEXT]}
_EMBEDDINGS = _numbers(_object("object = embedding, index: integer", embedding=_EMBEDDING))
_SCORES = _numbers(_object("object = score, index: integer, score: number"))
_RANK = _object("index: integer, relevance_score: number")
_RANKS = _object("id, model", results=_list(_RANK), usage=_PROMPT_USAGE)
_TOKENS = _object("count: integer, max_model_len: integer, tokens: list of integer")
_STATUS = _object(
    "state, models: list of string",
    parts=_list(_object("name, role, node, address")),
    late=_list(_object("part, step_s: number")),
    scale=_object(),
    fallbacks=_list(_object("part, what, why, instead")),
    weights=_object(),
)
_TIMELINE = _object(
    "class, id, object = request.timeline, outcome, began_at: number, ended_at: number or null",
    stages=_list(_object("stage, part, began_at: number, ended_at: number, text")),
    decisions=_list(_object("at: number, part, attempt: integer, kind, text")),
    **{name: _type("list of string") for name in ("displaced", "silent", "forgetful")},
)
_PERFETTO = _object("traceEvents: list of object")
_RESPONSE = _object("id, object = response, created_at: integer, model, status, output: list of object")
_MESSAGE_ANSWER = _object(
    "id, type = message, role = assistant, model, content: list of object, stop_reason: string or null, "
    "stop_sequence: string or null",
    usage=_object("input_tokens: integer, output_tokens: integer"),
)
_MESSAGE_ERROR = _object("type = error", error=_object("type, message"))
_FILE = _object("id, object = file, bytes: integer, created_at: integer, filename, purpose, status")
_BATCH = _object(
    "id, object = batch, endpoint, input_file_id, status, completion_window, created_at: integer, expires_at: integer",
    request_counts=_object("total: integer, completed: integer, failed: integer"),
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
    ids = "first_id: string or null, last_id: string or null"
    return _object(f"object = list, has_more: boolean, {ids}", data=_list(record))


def _query(**schemas: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple({"name": name, "in": "query", "schema": schema} for name, schema in schemas.items())


def _page_query(most: int) -> tuple[dict[str, Any], ...]:
    """Return the query parameters that choose a page of a list."""
    limit, order = {"type": "integer", "minimum": 1, "maximum": most}, {"type": "string", "enum": ["asc", "desc"]}
    return _query(limit=limit, after=_TEXT, order=order)


@dataclass(frozen=True)
class _RouteDocument:
    method: str
    path: str
    about: str  # a sentence that says what it is for
    answer: dict[str, Any]
    body: type[BaseModel] | dict[str, Any] | None = None  # a type for JSON, a schema for a form
    answer_types: tuple[str, ...] = (_JSON,)
    query: tuple[dict[str, Any], ...] = ()


_get, _post, _delete = (partial(_RouteDocument, method) for method in ("get", "post", "delete"))
_FORMATS = {"type": "string", "enum": ["json", "text", "perfetto"]}
_ROUTES = (
    _get("/", "What runs here, as a page for browsers.", _object("name", links=_object()), None, (_JSON, _HTML)),
    _get("/docs", "This document as a page.", _TEXT, None, (_HTML,)),
    _get("/live", "Whether this process answers.", _object("status")),
    _get(
        "/health",
        "Whether requests are served, and what does not work in any part.",
        _object("status", fallbacks=_list(_object("part, what, instead"))),
    ),
    _get("/ready", "Whether requests are taken now: not while the server drains.", _object("status")),
    _get("/metrics", "Metrics in Prometheus' text form.", _TEXT, None, (_PLAIN,)),
    _get("/status", "The parts that run, how many workers there may be, and how workers keep weights.", _STATUS),
    _get("/version", "The version of AlignedServe.", _object("version")),
    _get("/openapi.json", "This document.", _ANY),
    _get("/v1/models", "The models that answer.", _object("object = list", data=_list(_CARD))),
    _get("/v1/models/{name}", "One of them.", _CARD),
    _post("/v1/load_lora_adapter", "Load an adapter (LoRA).", _TEXT, LoadAdapter, (_PLAIN,)),
    _post("/v1/unload_lora_adapter", "Unload an adapter.", _TEXT, UnloadAdapter, (_PLAIN,)),
    _post("/v1/chat/completions", "The answer to a chat, whole or streamed.", _CHAT, ChatRequest, _STREAMED),
    _post(
        "/v1/completions",
        "What follows a text, whole or streamed.",
        _answer("text_completion", text=_TEXT),
        CompletionRequest,
        _STREAMED,
    ),
    _post("/v1/embeddings", "A vector of each text.", _EMBEDDINGS, EmbeddingRequest),
    *(_post(path, "A score of each pair of texts.", _SCORES, ScoreRequest) for path in ("/v1/score", "/score")),
    *(
        _post(path, "Documents in the order of their relevance.", _RANKS, RerankRequest)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    _post("/v1/responses", "A response, whole or streamed.", _RESPONSE, ResponseRequest, _STREAMED),
    _get("/v1/responses/{id}", "A response that was kept.", _RESPONSE),
    _delete("/v1/responses/{id}", "Delete a response.", _object("id, object = response, deleted: boolean")),
    _post("/v1/responses/{id}/cancel", "Cancel a response that runs aside.", _RESPONSE),
    _get("/v1/responses/{id}/input_items", "What a response answered.", _page(_ANY), query=_page_query(MOST_ITEMS)),
    _post(
        "/v1/messages", "A message in Anthropic's form, whole or streamed.", _MESSAGE_ANSWER, MessageRequest, _STREAMED
    ),
    _post(
        "/v1/messages/count_tokens", "How many tokens its prompt has.", _object("input_tokens: integer"), CountRequest
    ),
    _post("/tokenize", "The tokens of a prompt or a chat.", _TOKENS, TokenizeRequest),
    _post("/detokenize", "The text of tokens.", _object("prompt"), DetokenizeRequest),
    _get(
        "/v1/requests/{id}/timeline",
        "Where a request of yours waited, and what was decided about it.",
        {"anyOf": [_TIMELINE, _PERFETTO]},
        None,
        (_JSON, _PLAIN),
        _query(format=_FORMATS),
    ),
)
_BINARY = {"type": "string", "format": "binary"}
_FILE_QUERY = *_page_query(MOST_FILES), *_query(purpose=_TEXT)
_JOB_ROUTES = (
    _post("/v1/files", "Upload a file of lines for a batch job.", _FILE, _NEW_FILE),
    _get("/v1/files", "Your files.", _page(_FILE), query=_FILE_QUERY),
    _get("/v1/files/{id}", "A file, without its bytes.", _FILE),
    _delete("/v1/files/{id}", "Delete a file.", _object("id, object = file, deleted: boolean")),
    _get("/v1/files/{id}/content", "The bytes of a file.", _BINARY, None, (_BYTES,)),
    _post("/v1/batches", "Start a batch job.", _BATCH, NewBatch),
    _get("/v1/batches", "Your batch jobs.", _page(_BATCH), query=_page_query(MOST_BATCHES)),
    _get("/v1/batches/{id}", "A batch job, and how far it is.", _BATCH),
    _post("/v1/batches/{id}/cancel", "Cancel a batch job.", _BATCH),
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
