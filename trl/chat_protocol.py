"""What OpenAI-compatible endpoints send back, read without trust: any JSON, or none, can stand anywhere."""

import re
import time
from collections.abc import Collection
from email.utils import parsedate_to_datetime
from typing import Any

import openai
from openai.types.chat import ChatCompletion

LONGEST_REPLY = 100_000
"""Characters kept of a reply. A server that ignores max_tokens can send megabytes."""

_RETRIED = frozenset({408, 409, 429})
_UNSUPPORTED = re.compile(
    r"unsupported|not\W+support|n't support|unrecogni[sz]ed|unknown|unexpected|not permitted|not allowed|deprecated",
    re.IGNORECASE,
)


def text_of(completion: ChatCompletion) -> str:
    """The reply's text, "" where the server says null. Raises ValueError where there is no chat completion."""
    try:
        content = completion.choices[0].message.content
    except (AttributeError, IndexError, KeyError, TypeError):
        raise ValueError("not a chat completion") from None
    if not isinstance(content, str | None):
        raise ValueError("a chat completion whose content is not text")
    return (content or "")[:LONGEST_REPLY]


def usage_of(completion: ChatCompletion) -> tuple[int, int] | None:
    """Tokens of prompt and reply as the server counted them; None where it did not."""
    try:
        counts = (completion.usage.prompt_tokens, completion.usage.completion_tokens)  # type: ignore[union-attr]
    except AttributeError:
        return None
    return counts if all(isinstance(count, int) and count >= 0 for count in counts) else None


def unsupported_parameter(error: openai.APIStatusError, names: Collection[str]) -> str | None:
    """Which of the request's parameters ``names`` a 400 or 422 calls unsupported; None for any other complaint."""
    if error.status_code not in (400, 422):
        return None
    body = error.body if isinstance(error.body, dict) else {}
    said = f"{error.message} {error.body}"  # servers differ in where they put it
    if not _UNSUPPORTED.search(said):
        return None
    if isinstance(body.get("param"), str):
        return body["param"] if body["param"] in names else None
    named = [(m.start(), name) for name in names if (m := re.search(rf"\b{re.escape(name)}\b", said))]
    return min(named)[1] if named else None


def is_retried(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in _RETRIED or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError | TimeoutError)


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status of an error that has one."""
    return error.status_code if isinstance(error, openai.APIStatusError) else None


def retry_after(error: BaseException | None) -> float | None:
    """Seconds the server asks to wait: the Retry-After header, in seconds or as an HTTP date."""
    if not isinstance(error, openai.APIStatusError):
        return None
    value = error.response.headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def reason_of(error: BaseException | None, timeout: float) -> str:
    """Why a request failed, in words that hold nothing secret: no URL, header or echoed body."""
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}"
    if isinstance(error, openai.APITimeoutError | TimeoutError):
        return f"no answer in {timeout:g} s"
    if isinstance(error, openai.APIConnectionError):
        return f"connection error ({type(error.__cause__ or error).__name__})"
    return f"malformed reply ({type(error).__name__})"


def without(text: str, secret: Any) -> str:
    """``text`` with a secret blanked, for servers that echo the key."""
    return text.replace(secret, "[key]") if isinstance(secret, str) and secret else text
