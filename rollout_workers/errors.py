"""Errors by what the caller should do next.

Every class takes positional arguments only and keeps them in ``args``, so an error that crosses an
actor boundary arrives whole. What happened to a rollout (length, abort, tool-parse failure) is data
on its row, not an exception.
"""

from __future__ import annotations

from typing import ClassVar


class RolloutError(Exception):
    """Base of all errors of this package.

    Args (positional): ``message`` for people, ``param`` that is at fault (``input[2].content``),
    ``code`` for programs, ``request_id`` of the call, ``worker`` it ran on; all but the first
    optional.
    """

    status: ClassVar[int] = 500  # the HTTP status that carries this error
    kind: ClassVar[str] = "server_error"  # OpenAI's ``error.type``
    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str = "",
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        worker: str | None = None,
        /,
    ) -> None:
        super().__init__(message, param, code, request_id, worker)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.request_id = request_id
        self.worker = worker

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, object]:
        """The error as an OpenAI-shaped JSON body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class BadRequest(RolloutError):
    """The request can never succeed as it is: do not retry."""

    status, kind, default_code = 400, "invalid_request_error", "invalid_value"


class ContextOverflow(BadRequest):
    """The prompt does not fit the model's context."""

    default_code = "context_length_exceeded"


class NotFound(RolloutError):
    """An unknown model, session, response or URL."""

    status, kind, default_code = 404, "invalid_request_error", "not_found"


class Unauthorized(RolloutError):
    """The bearer key is missing or wrong."""

    status, kind, default_code = 401, "authentication_error", "invalid_api_key"


class Conflict(RolloutError):
    """The call contradicts an earlier one, such as a second, different finish."""

    status, kind, default_code = 409, "invalid_request_error", "conflict"


class Overloaded(RolloutError):
    """No room now: retry later."""

    status, kind, default_code, retryable = 429, "rate_limit_error", "overloaded", True


class TimedOut(RolloutError):
    """The caller's deadline passed; nothing of the call is trained on."""

    status, default_code, retryable = 500, "timeout", True


class WorkerLost(RolloutError):
    """The engine went away or cut the generation; another attempt may succeed."""

    default_code, retryable = "worker_lost", True


class BadEngineReply(RolloutError):
    """The engine answered with something that cannot be trained on; it is never repaired."""

    default_code = "bad_engine_reply"


class PoolNotReady(RolloutError):
    """No worker serves yet, or none is left."""

    status, default_code, retryable = 503, "pool_not_ready", True


class NotStored(RolloutError):
    """The buffer did not confirm the rows; the session keeps them: finish it again."""

    status, default_code, retryable = 503, "not_stored", True


class StartFailed(RolloutError):
    """A pool or an engine could not start; the message carries the cause."""

    default_code = "start_failed"


class ConfigError(RolloutError, ValueError):
    """A configuration that cannot work, found before anything is started."""

    status, kind, default_code = 400, "invalid_request_error", "bad_config"


class ModelNotFound(ConfigError):
    """No model by that name; the message says what was looked for and what to do."""

    default_code = "model_not_found"
