"""Errors of the hub and of the connection to it, in one line each."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyorch.errors import SparqError


class Unreachable(SparqError):
    """There is no connection to the hub, or it cannot answer at present."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error response, or 0."""
    return getattr(getattr(error, "response", None), "status_code", None) or 0


def is_from_client(error: BaseException) -> bool:
    """Whether the HTTP client raised it: for an error response or a failed connection.

    The client is httpx or httpx2, depending on the version of huggingface-hub.
    """
    from huggingface_hub.utils import HfHubHTTPError

    return isinstance(error, HfHubHTTPError.__bases__[0])


def retry_after(error: BaseException) -> float | None:
    """The seconds that a response asks to wait: Retry-After, or the hub's `RateLimit: ...;t=`."""
    if not status_of(error):
        return None
    headers = error.response.headers  # type: ignore[attr-defined]
    if match := re.search(r";\s*t=(\d+)", headers.get("RateLimit", "")):
        return float(match[1])
    asked = headers.get("Retry-After", "")
    return float(asked) if asked.isdecimal() else None  # dates are not supported


@contextmanager
def explained(repo: str, revision: str) -> Iterator[None]:
    """Turn the exceptions of huggingface-hub and its client into a SparqError with a hint."""
    try:
        yield
    except Exception as e:
        if not (isinstance(e, (OSError, ValueError)) or is_from_client(e)):
            raise
        raise _reason(repo, revision, e) from None


def _reason(repo: str, revision: str, e: BaseException) -> SparqError:
    from huggingface_hub import get_token
    from huggingface_hub import utils as hub

    login = "log in with `hf auth login`, or set HF_TOKEN"
    status = status_of(e)
    if isinstance(e, hub.GatedRepoError):
        return SparqError(
            f"{repo} is gated: its owner gives access to those who accept the terms",
            f"accept them on the repository's page, then {login}",
        )
    if isinstance(e, hub.RevisionNotFoundError):
        return SparqError(f"{repo}: no revision {revision}", "@main is the newest")
    token = get_token()
    if isinstance(e, hub.RepositoryNotFoundError) or status == 404 or (status == 401 and not token):
        who = "your token may not see it" if token else "private"
        return SparqError(f"{repo}: not found, or {who}", f"check the name; if private, {login}")
    if status == 401:
        return SparqError(f"{repo}: the hub refused the token", login)
    if status == 403:
        return SparqError(f"{repo}: access denied", f"{login}, with an account that has access")
    if status == 429:
        wait = retry_after(e)
        hint = f"wait {wait:.0f} s" if wait else "wait a few minutes"
        return SparqError(f"{repo}: the hub refuses: too many requests", f"{hint}, or {login}")
    if status:
        kind = Unreachable if status >= 500 else SparqError
        return kind(f"{repo}: the hub answered {status}", "try again later")
    if isinstance(e, hub.HFValidationError):
        return SparqError(
            f"{repo!r} is not the name of a repository", "it is org/repo", exit_code=2
        )
    what = (str(e).splitlines() or [type(e).__name__])[0]
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
        return SparqError(f"{repo}: the disk is full", "free some disk space, then pull again")
    if isinstance(e, OSError) and e.filename:
        return SparqError(f"{e.filename}: {e.strerror}")
    return Unreachable(
        f"{repo}: the hub cannot be reached, or gives no usable answer: {what}",
        "check the network and HF_ENDPOINT",
    )
