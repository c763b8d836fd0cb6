"""Errors as answers over HTTP."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.gateway.openai.errors import ApiError, api_error


def response_of(error: Exception) -> JSONResponse:
    told = api_error(error)
    return JSONResponse(told.body, status_code=told.status, headers=told.headers)


async def on_api_error(_: HttpRequest, error: Exception) -> Response:
    return response_of(error)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    """What the routes themselves refuse: an unknown path, a method that a path has not."""
    status, headers = getattr(error, "status_code", 500), getattr(error, "headers", None)
    messages = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not take {request.method}",
    }
    return response_of(ApiError(status, messages.get(status, "the request cannot be served"), headers=headers))
