"""Every exception that Octavo raises on purpose.

    OctavoError                      500  something broke that should not
    ├── BadRequestError              400  the caller can mend the request
    │   ├── InvalidParameterError    400  one field, its value and what is allowed
    │   ├── ContextLengthError       400  prompt (and max_tokens) beyond the model's context
    │   ├── PoolTooSmallError        400  could never fit the block pool, not even alone
    │   ├── ChatTemplateError        400  no template, or the template refused the messages
    │   └── BodyTooLargeError        413  more bytes than the server takes
    ├── AccessError                  401  no API key, or one that the server does not know
    │   └── ForbiddenError           403  a known key, but not for this
    ├── ModelNotFoundError           404  unknown name, missing file, or not to be had offline
    ├── RequestNotFoundError         404  nothing is kept of a request with this id
    ├── RetryLaterError              503  not now; in `retry_after` seconds it may work
    │   ├── EngineDeadError          503  the engine died or hung while the request ran
    │   ├── QueueFullError           429  more requests or tokens wait than may
    │   └── QueueTimeoutError        503  the request waited longer than it may
    ├── DeadlineError                504  the request took longer than its deadline
    └── StartupError                 500  the engine cannot start
        ├── SettingError             500  an unknown or impossible setting
        ├── ModelFileError           500  a file is damaged, hostile or not what its name says
        ├── UnsupportedModelError    500  a sound file that Octavo cannot run
        └── FetchError               500  a download failed, or its digest is wrong

A message is one line: what happened, the numbers, and what to do. `status` is the HTTP status and
`code` OpenAI's error code, where it has one.
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar


class OctavoError(Exception):
    """Root of the tree: catch this to catch everything Octavo raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str | None] = None


class BadRequestError(OctavoError):
    """The request cannot be served as it stands; the message says how to mend it."""

    status = 400


class InvalidParameterError(BadRequestError):
    """A field's value is out of range or of the wrong type.

    `field` is the parameter's public name; the message names it, the value and the allowed range.
    """

    code = "invalid_value"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} must be {allowed}, not {shorten(value)}.")
        self.field = field


class ContextLengthError(BadRequestError):
    """The prompt, or the prompt and `max_tokens` together, exceed the context length.

    num_prompt_tokens, max_tokens, limit: the numbers, where they are known; max_tokens is None if
    the prompt alone is too long.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        num_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class PoolTooSmallError(BadRequestError):
    """The request needs more KV blocks than the pool holds, so waiting would never help."""


class ChatTemplateError(BadRequestError):
    """The model has no chat template, or its template rejected these messages."""


class BodyTooLargeError(BadRequestError):
    """The body of an HTTP request has more bytes, or more values, than the server takes."""

    status = 413


class AccessError(OctavoError):
    """The request brings no API key, or one that the server does not know."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(AccessError):
    """The API key is known, but its scopes do not allow this."""

    status = 403
    code = "insufficient_permissions"


class ModelNotFoundError(OctavoError):
    """No such model name, file or repository."""

    status = 404
    code = "model_not_found"


class RequestNotFoundError(OctavoError):
    """Nothing is kept of a request with this id, or it is not the caller's."""

    status = 404
    code = "request_not_found"


class RetryLaterError(OctavoError):
    """The server cannot take the request now. `retry_after`: seconds to wait, if it can tell."""

    status = 503

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(RetryLaterError):
    """The engine died or hung while the request ran; nobody knows how far it came."""

    code = "engine_dead"


class QueueFullError(RetryLaterError):
    """More requests or tokens wait already than the server lets wait."""

    status = 429
    code = "queue_full"


class QueueTimeoutError(RetryLaterError):
    """The request waited for its first step longer than the server lets it."""

    code = "queue_timeout"


class DeadlineError(OctavoError):
    """The request took longer than its deadline allows."""

    status = 504
    code = "deadline_exceeded"


class StartupError(OctavoError):
    """The engine cannot start with this model and these settings."""


class SettingError(StartupError):
    """An unknown setting, or a value that the model or the machine does not allow."""


class ModelFileError(StartupError):
    """A model file is truncated, damaged, hostile, or of another kind than it claims."""


class UnsupportedModelError(StartupError):
    """The file is sound, but Octavo does not know its architecture, format or tokenizer."""


class FetchError(StartupError):
    """A download failed, or what arrived is not what was asked for."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names what `name` may have meant: " Did you mean 'x'?", or ""."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""


def shorten(value: object, limit: int = 80) -> str:
    """Return `repr(value)` cut to `limit` characters, so that no message carries a whole prompt."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"
