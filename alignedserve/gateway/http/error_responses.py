"""Turn errors into HTTP answers."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.gateway.openai.errors import ApiError, api_error


def error_response(error: Exception) -> JSONResponse:
    answer = api_error(error)
    return JSONResponse(answer.body, status_code=answer.status, headers=answer.headers)


async def on_api_error(_: HttpRequest, error: Exception) -> Response:
    return error_response(error)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer an error of the routing itself: an unknown path, or a method that the path does not have."""
    status, headers = getattr(error, "status_code", 500), getattr(error, "headers", None)
    messages = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not take {request.method}",
    }
    return error_response(ApiError(status, messages.get(status, "the request cannot be served"), headers=headers))
