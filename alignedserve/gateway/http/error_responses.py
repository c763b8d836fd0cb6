"""Turn errors into HTTP answers, in the form of the interface whose path was asked for."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.gateway.anthropic.errors import PATH, message_error
from alignedserve.gateway.openai.errors import ApiError, api_error


def error_response(error: Exception, path: str = "") -> JSONResponse:
    answer = api_error(error)
    body = message_error(answer) if path.startswith(PATH) else answer.body
    return JSONResponse(body, status_code=answer.status, headers=answer.headers)


async def on_api_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer an error of the routing itself: an unknown path, or a method that the path does not have."""
    status, headers, path = getattr(error, "status_code", 500), getattr(error, "headers", None), request.url.path
    messages = {404: f"there is no {path} here", 405: f"{path} does not take {request.method}"}
    return error_response(ApiError(status, messages.get(status, "the request cannot be served"), headers=headers), path)
