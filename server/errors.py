"""Every error a client can get: one exception tree, and its body in OpenAI's shape.

Raise an ``ApiError`` anywhere below a route; ``server.http.error_handlers`` answers with it, as
``{"error": {message, type, param, code}}``.
"""

from pydantic import BaseModel, Field

ErrorBody = dict[str, dict[str, str | None]]

MAX_MESSAGE_LENGTH = 1000
MAX_PARAM_LENGTH = 200


class ErrorDetails(BaseModel):
    message: str = Field(description="What went wrong, for people to read.")
    type: str = Field(description="The kind of error, such as `invalid_request_error`.")
    param: str | None = Field(description="The field at fault, by its path in the body.")
    code: str | None = Field(description="What went wrong, for programs to compare.")


class ErrorAnswer(BaseModel):
    """Errors have this form, whatever their status."""

    error: ErrorDetails


class ApiError(Exception):
    """An error has an HTTP status. Subclasses fix status, type and code."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    def body(self) -> ErrorBody:
        return error_body(self.message, self.type, self.param, self.code)

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedParameterError(InvalidRequestError):
    code = "unsupported_parameter"


class ThreadUnsupportedError(InvalidRequestError):
    """Nothing keeps a conversation here. By this code Anthropic's SDK knows that it has to send all of it."""

    code = "thread_unsupported_request"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class AuthenticationError(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class PermissionDeniedError(ApiError):
    """The key is known, but it has no right to what it asks for."""

    status = 403
    type = "invalid_request_error"
    code = "permission_denied"


class ModelNotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class ModelBusyError(ApiError):
    """A model that requests use was to be unloaded."""

    status = 409
    type = "invalid_request_error"
    code = "model_busy"


class RequestTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaTypeError(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class WrongHostError(ApiError):
    """The request was meant for another server, by its Host header."""

    status = 421
    type = "invalid_request_error"
    code = "wrong_host"


class QueueFullError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after = 1


class TooManyRequestsError(ApiError):
    """One key has as many requests open as a key may have."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"
    retry_after = 1


class ClientDisconnectedError(ApiError):
    """The client has left: the status is for the log. Counted as aborted, not as an error."""

    status = 499
    type = "invalid_request_error"
    code = "client_disconnected"


class NotReadyError(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "not_ready"
    retry_after = 2


class ModelLoadFailedError(ApiError):
    """The model could not be loaded; the others are served. It is tried again after a while."""

    status = 503
    type = "service_unavailable_error"
    code = "model_load_failed"
    retry_after = 30


class WorkerLostError(ApiError):
    """The worker died while it held the request; trying again is safe."""

    status = 503
    type = "service_unavailable_error"
    code = "worker_lost"
    retry_after = 2


class NotClearedError(ApiError):
    """The files of a prefix cache could not be forgotten; what memory had of it is."""

    status = 500
    type = "server_error"
    code = "prefix_cache_not_cleared"


class HelperLostError(ApiError):
    """A process that helps the front end was lost over and over; trying again is safe."""

    status = 503
    type = "service_unavailable_error"
    code = "helper_lost"
    retry_after = 2


class ShuttingDownError(ApiError):
    """The server ends before the request has; another one may take it."""

    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"
    retry_after = 2


class RequestTimeoutError(ApiError):
    """The configured ``request_timeout`` passed. A second attempt would wait as long again."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}  # which the OpenAI SDK obeys


class EngineError(ApiError):
    """The engine gave up on one request."""

    code = "engine_error"


class InternalError(ApiError):
    code = "internal_error"


# Codes of errors that are raised with one of their own, those of ``Failed`` from the engine included.
OTHER_CODES = frozenset(
    {"duplicate_key", "empty_prompt", "invalid_grammar", "invalid_json", "invalid_logits", "invalid_token_id"}
    | {"invalid_type", "missing_required_parameter", "speculation_unavailable", "unknown_parameter"}
    | {"wrong_task"}
)


def kinds_of_errors(kind: type[ApiError] = ApiError) -> list[type[ApiError]]:
    """Returns all classes below ``kind``."""
    return [each for below in kind.__subclasses__() for each in (below, *kinds_of_errors(below))]


def error_codes() -> list[str]:
    """Returns every code that an answer may have, but for those of HTTP errors without one of ours."""
    return sorted({kind.code for kind in kinds_of_errors() if kind.code} | OTHER_CODES)


def code_of(error: Exception) -> str:
    """Returns the code under which an error is counted and logged: a bug of ours has one, too."""
    return error.code or error.type if isinstance(error, ApiError) else str(InternalError.code)


def error_body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    """Both texts may quote the client: a long body must not come back as a longer error."""
    shown_param = None if param is None else _shorten(param, MAX_PARAM_LENGTH)
    shown = _shorten(message, MAX_MESSAGE_LENGTH)
    return {"error": {"message": shown, "type": kind, "param": shown_param, "code": code}}


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def internal_error(request_id: str) -> InternalError:
    """Tells a client what it may know about a bug of ours; the log has the rest under the same id."""
    return InternalError(f"The server failed to handle this request. Its id in the log is {request_id}.")
