"""Turn errors into HTTP answers, in the form of the interface whose path was asked for: OpenAI's or Anthropic's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.gateway.http.records import HttpRecord
from alignedserve.gateway.openai.errors import TYPES, ApiError, api_error

MESSAGES = "/v1/messages"  # the paths whose errors have Anthropic's form begin so

# The `type` of Anthropic's error by its status; any other is the client's fault below 500 and ours from 500 on.
_TYPES = TYPES | {413: "request_too_large", 503: "overloaded_error"}


def message_error(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: BaseException, record: HttpRecord | None = None) -> JSONResponse:
    """Return the answer of this error, which the record of its request keeps, if it has one yet."""
    answer = api_error(error)
    if record is not None:
        record.note(answer)
    is_message = record is not None and record.path.startswith(MESSAGES)
    body = message_error(answer) if is_message else answer.body
    return JSONResponse(body, status_code=answer.status, headers=answer.headers)


async def on_api_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(error, request.state.record)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer an error of the routing itself: an unknown path, or a method that the path does not have."""
    status, headers, path = getattr(error, "status_code", 500), getattr(error, "headers", None), request.url.path
    messages = {404: f"there is no {path} here", 405: f"{path} does not take {request.method}"}
    message, logged = messages.get(status, "the request cannot be served"), {404: "there is no such path"}.get(status)
    if status == 405 and "access-control-request-method" in request.headers:  # a browser asks whether a page may come
        logged = f"{message}: a page of an origin that is not in --cors-origins"
        message += f": start the server with --cors-origins {request.headers.get('origin', ''):.80} for this page"
    return error_response(ApiError(status, message, headers=headers, logged=logged), request.state.record)
