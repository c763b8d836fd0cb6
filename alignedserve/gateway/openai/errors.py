"""Errors in OpenAI's form, over HTTP or in the error file of a batch: what they are made of, and those that several
places raise."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from alignedserve.errors import AlignedServeError, BytesGone, ModelError, PromptError, StoreError, StoreFull, StoreTaken
from alignedserve.gateway.access.keys import ANONYMOUS, Caller
from alignedserve.owner.client import Culprit, CutOff, GivenUp, Overloaded
from alignedserve.shell.bounded_threads import WorkTooLong

RETRY_AFTER_DRAINING_S = 5
RETRY_AFTER_NO_RUNNER_S = 10
HANGS_UP = {"Connection": "close"}  # the rest of the body is not read

# The `type` of an error by its status; any other status is the client's fault below 500 and ours from 500 on.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


_QUOTE = re.compile(r"""(?!(?<=\w\w)'[st]\b)["']""")  # what a client sent stands in quotes; not the 's of a word
_MOST_LOGGED = 300  # characters


class ApiError(AlignedServeError):
    """An error as an answer: its status, its body in OpenAI's form, its headers. `logged` is what the log says of it
    where the message holds what the client sent, and not in quotes."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self._logged = logged
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def logged(self) -> str:
        """Return the message without anything that the client sent: up to the first quote, in one line."""
        said, *hidden = _QUOTE.split(self.message if self._logged is None else self._logged, 1)
        return " ".join(said.split())[:_MOST_LOGGED] + ("..." if hidden else "")

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client has left or no longer reads: no answer can reach it."""


def invalid(message: str, param: str | None = None, code: str | None = None, *, logged: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code, logged=logged)


def no_such_model(model: str) -> ApiError:
    message = f"the model {model!r} is not served here: see /v1/models"
    said = "no model of this name is served here"
    return ApiError(404, message, param="model", code="model_not_found", logged=said)


def only_embeds(model: str) -> ApiError:
    message = f"the model {model!r} writes no text here: send texts to /v1/embeddings, or to /v1/rerank"
    return ApiError(400, message, param="model", code="unsupported_model")


def no_such_request(request: str) -> ApiError:
    message = f"no request {request!r:.160} of this key is remembered: parts remember the last minutes"
    return ApiError(404, message, code="request_not_found")


def try_later(status: int, message: str, code: str, after_s: float = 1, **more: Any) -> ApiError:
    """Return an error after which a client may try again; `more` are its parameter, or other headers."""
    error = ApiError(status, message, code=code, **more)
    error.headers["Retry-After"] = str(max(1, math.ceil(after_s)))
    return error


# Errors that always say the same. Each is made when it is raised, since an error keeps where that was.
overloaded = partial(try_later, 503, code="server_is_overloaded")
draining = partial(overloaded, "the server is shutting down: try again", after_s=RETRY_AFTER_DRAINING_S)
not_ready = partial(try_later, 503, "no workers are ready: try again", "not_ready")
no_runner = partial(try_later, 503, "no job runner is ready: try again", "not_ready", RETRY_AFTER_NO_RUNNER_S)
_NO_KEY = "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
no_key = partial(ApiError, 401, _NO_KEY, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
_NO_PAGE = "an API key with the scope dashboard is needed: a browser asks for it as a password, under any name"
_ASKS = {"WWW-Authenticate": 'Basic realm="AlignedServe: any name, and an API key", charset="UTF-8"'}
no_key_for_page = partial(ApiError, 401, _NO_PAGE, code="invalid_api_key", headers=_ASKS)
_KEY_REVOKED = "the API key of this request has been revoked, or lost the scope for it: its answer ends here"
key_revoked = partial(ApiError, 401, _KEY_REVOKED, code="key_revoked")
bad_head = partial(invalid, "this is not a valid HTTP request", code="invalid_http")
_LARGE_HEAD = "the request line or the headers are too long or too many"
head_too_large = partial(ApiError, 431, _LARGE_HEAD, code="headers_too_large")
_NO_TOKEN = "no next token could be chosen: the model's logits are not finite, or what is allowed leaves none"
no_token = partial(ApiError, 500, _NO_TOKEN, code="generation_failed")
_INTERNAL = "internal error: find it in the server's log under this answer's x-request-id"
internal = partial(ApiError, 500, _INTERNAL, code="internal_error")


def rate_limited(limit: str, wait_s: float) -> ApiError:
    """Return the error for a caller that has used all that its key allows."""
    message = f"this API key is limited to {limit}: try again in {max(1, math.ceil(wait_s))} s"
    return try_later(429, message, "rate_limit_exceeded", wait_s)


def no_room(caller: Caller, what: str) -> ApiError:
    """Return the error for a caller that has its part of what a gateway can hold. It ends the connection too."""
    if caller is ANONYMOUS:
        return overloaded(f"the server holds as many {what} as it can: try again")
    error = rate_limited(f"its part of the {what} that the server can hold", 1.0)
    error.headers |= HANGS_UP
    return error


def culprit(why: str, code: str = "request_ends_workers") -> ApiError:
    return ApiError(500, why, code=code, headers={"x-should-retry": "false"})


def api_error(error: BaseException) -> ApiError:
    """Return an error as the client sees it; an unexpected error shows none of its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CutOff):
        return draining()
    if isinstance(error, Culprit):
        return culprit(str(error))
    if isinstance(error, WorkTooLong):
        return culprit(f"{error}: do not send it again", "body_takes_too_long")
    if isinstance(error, Overloaded):
        why = error.why + (f" (see `{error.command}`)" if error.command else "")
        status, code = (503, "server_is_overloaded") if isinstance(error, GivenUp) else (429, "rate_limit_exceeded")
        return try_later(status, why, code, error.retry_after_s)
    if isinstance(error, StoreFull):  # its text names a place of this machine, as those of all that follow
        return ApiError(507, "the store has no space left", code="insufficient_storage", logged=str(error))
    if isinstance(error, StoreTaken):  # its text names places and deployments
        message = "another deployment has the store of batches: the log of the job runner says which"
        return try_later(503, message, "not_ready", RETRY_AFTER_NO_RUNNER_S)
    if isinstance(error, BytesGone):
        return try_later(503, str(error), "store_unavailable", 5)
    if isinstance(error, StoreError):
        return try_later(503, "the store cannot be used now", "store_unavailable", 5, logged=str(error))
    if isinstance(error, PromptError | ModelError):  # a model that is served can only lack a chat template
        said = str(error)  # what a template says of messages may quote them
        return invalid(said, "messages", logged=said.partition(": ")[0].partition(" named ")[0])
    return internal()


def from_validation(error: ValidationError, body: Any) -> ApiError:
    """Return the first fault of a body, with the field that has it."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = first.get("ctx", {}).get("field")  # set by our own validators of a whole object
    param = _param((*first["loc"], field) if field else first["loc"], body)
    if first["type"] == UNKNOWN:
        logged = "there is no such field"
        return invalid(f"{param}: {first['msg']}", param, "unknown_parameter", logged=logged)
    declared = first["loc"][0] if first["loc"] else field or "body"  # names below it may be the client's
    if first["type"] == "union_tag_not_found" and first["ctx"]["discriminator"] == "'type'":
        param = _param((*first["loc"], "type"), body)
    if first["type"] in ("missing", "union_tag_not_found"):
        logged = f"{declared}: its {str(param).rpartition('.')[2]} is missing"
        return invalid(f"{param} is missing", param, "missing_required_parameter", logged=logged)
    if first["type"] == "union_tag_invalid":
        kind, known = first["ctx"]["tag"], first["ctx"]["expected_tags"]
        param = _param((*first["loc"], "type"), body)
        said = f"{kind!r} is not supported here, only {known}"
        return invalid(f"{param}: {said}", param, "unsupported_parameter", logged=f"{declared}: not supported here")
    if first["type"] == UNSUPPORTED:
        return invalid(first["msg"], param, "unsupported_parameter")
    said = first["msg"]
    return invalid(f"{param}: {said}" if param else said, param, "invalid_value", logged=f"{declared}: {said}")


# The types of our own validation errors for fields that are known but not supported, and for those that are not known.
UNSUPPORTED, UNKNOWN = "unsupported", "unknown"


def _param(location: tuple[int | str, ...], body: Any) -> str | None:
    """Return a field's path such as messages[0].content, without pydantic's names for the branches of a union."""
    path, at = "", body
    for step in location:
        if isinstance(at, dict) and step not in at and step != location[-1]:
            continue  # only the last may be missing: this is the name of a branch
        if isinstance(step, int):
            path, at = f"{path}[{step}]", at[step] if isinstance(at, list) and step < len(at) else None
        elif isinstance(at, dict):
            path, at = f"{path}.{step}" if path else step, at.get(step)
    return path or None
