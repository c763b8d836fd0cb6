"""Our own OpenAPI document: every route with its parameters, body and answers, as routes.yaml lists them.

The schema of a body is made from the type that checks the body. Some rules concern several fields and are in no
schema: a body that breaks such a rule is refused with 400, which every route names among its answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from alignedserve.gateway.batches import MOST_LISTED as MOST_BATCHES
from alignedserve.gateway.batches import NewBatch
from alignedserve.gateway.files import EXPIRES_S
from alignedserve.gateway.files import MOST_LISTED as MOST_FILES
from alignedserve.gateway.http.error_responses import MESSAGES
from alignedserve.gateway.http.middleware import PUBLIC
from alignedserve.gateway.llama_cpp import InfillRequest, LlamaCompletionRequest
from alignedserve.gateway.messages import CountRequest, MessageRequest
from alignedserve.gateway.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapter,
    TokenizeRequest,
    UnloadAdapter,
)
from alignedserve.gateway.responses.types import ResponseRequest
from alignedserve.gateway.vectors import EmbeddingRequest, RerankRequest, ScoreRequest

_REF = "#/components/schemas/{model}"
_TYPES = {
    "json": "application/json",
    "events": "text/event-stream",
    "plain": "text/plain",
    "html": "text/html",
    "bytes": "application/octet-stream",
}
_TEXTS = ("events", "plain", "html")
_TEXT = {"type": "string"}
_BODIES: dict[str, type[BaseModel]] = {
    kind.__name__: kind
    for kind in (
        *(ChatRequest, CompletionRequest, ResponseRequest, MessageRequest, CountRequest, EmbeddingRequest),
        *(ScoreRequest, RerankRequest, TokenizeRequest, DetokenizeRequest, LoadAdapter, UnloadAdapter, NewBatch),
        *(InfillRequest, LlamaCompletionRequest),
    )
}
_NEW_FILE = {  # a form
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


def _page_query(most: int) -> dict[str, Any]:
    """Return the query parameters that choose a page of a list."""
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return {"limit": limit, "after": _TEXT, "order": {"type": "string", "enum": ["asc", "desc"]}}


_QUERIES: dict[str, dict[str, Any]] = {
    "items": _page_query(MOST_BATCHES),
    "files": {**_page_query(MOST_FILES), "purpose": _TEXT},
    "batches": _page_query(MOST_BATCHES),
    "timeline": {"format": {"type": "string", "enum": ["json", "text", "perfetto"]}},
}


@cache
def _listed() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = yaml.safe_load(files("alignedserve.gateway").joinpath("routes.yaml").read_text("utf-8"))
    return loaded


def _schema(said: Any) -> dict[str, Any]:
    """Return the JSON schema of what routes.yaml says in short."""
    match said:
        case {"either": several}:
            return {"anyOf": [*map(_schema, several)]}
        case {"enum": words}:
            return {"anyOf": [{"type": "string", "enum": words}, {"type": "null"}]}
        case {"page": record}:
            ends = {"first_id": "string or null", "last_id": "string or null"}
            return _schema({"object": "= list", "has_more": "boolean", **ends, "data": [record]})
        case dict():
            properties = {name: _schema(field) for name, field in said.items()}
            return {"type": "object", "properties": properties, "required": list(properties)}
        case [item]:
            return {"type": "array", "items": _schema(item)}
        case "bytes":
            return {"type": "string", "format": "binary"}
        case str() if said.startswith("= "):
            return {"const": said.removeprefix("= ")}
        case str() if said.endswith(" or null"):
            return {"anyOf": [{"type": said.removesuffix(" or null")}, {"type": "null"}]}
    return {"type": said}


def bodies() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the path of each route that takes a body in JSON, with the type that checks it."""
    for name, route in {**_listed()["routes"], **_listed()["job_routes"]}.items():
        if route.get("body") in _BODIES:
            yield name.split()[1], _BODIES[route["body"]]


def document(with_jobs: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a deployment with or without batch jobs."""
    listed = _listed()
    routes = {**listed["routes"], **(listed["job_routes"] if with_jobs else {})}
    kinds = [_BODIES[route["body"]] for route in routes.values() if route.get("body") in _BODIES]
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    paths: dict[str, Any] = {}
    for name, route in routes.items():
        method, path = name.split()
        paths.setdefault(path, {})[method.lower()] = _operation(path, route)
    errors = {"Error": _schema(listed["schemas"]["error"]), "MessageError": _schema(listed["schemas"]["message error"])}
    return {
        "openapi": "3.1.0",
        "info": {"title": "AlignedServe", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], **errors},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, route: Mapping[str, Any]) -> dict[str, Any]:
    answer = _schema(route["answer"])
    content = {_TYPES[kind]: {"schema": _TEXT if kind in _TEXTS else answer} for kind in route.get("as", ["json"])}
    model = "MessageError" if path.startswith(MESSAGES) else "Error"
    error = {_TYPES["json"]: {"schema": {"$ref": _REF.format(model=model)}}}
    refusals = {str(status): {"description": why, "content": error} for status, why in _listed()["refusals"].items()}
    responses = {"200": {"description": "the answer", "content": content}, **refusals}
    operation: dict[str, Any] = {"summary": route["about"], "responses": responses}
    in_path = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in in_path]
    query = _QUERIES.get(route.get("query", ""), {})
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    if parameters:
        operation["parameters"] = parameters
    if (body := route.get("body")) in _BODIES:
        content = {_TYPES["json"]: {"schema": {"$ref": _REF.format(model=body)}}}
        operation["requestBody"] = {"required": True, "content": content}
    elif body is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _NEW_FILE}}}
    if path not in PUBLIC:
        operation["security"] = [{"key": []}, {}]  # a server without keys asks for none
    return operation
