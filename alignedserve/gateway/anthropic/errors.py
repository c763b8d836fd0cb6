"""Every error that a client can get, in Anthropic's form."""

from __future__ import annotations

from typing import Any

from alignedserve.gateway.openai.errors import ApiError

PATH = "/v1/messages"  # of the routes whose errors have this form

# The `type` of an error by its status; any other status is the client's fault below 500 and ours from 500 on.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
