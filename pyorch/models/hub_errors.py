"""Errors of huggingface-hub and of the connection to the hub, in one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyorch.errors import SparqError
from pyorch.models.new_file import DISK_FULL


class NoAnswer(SparqError):
    """The hub cannot be reached, or it refuses, or something on the way does."""


@contextmanager
def explained(repo: str, revision: str) -> Iterator[None]:
    """Turn any exception of a call to huggingface-hub into a NoAnswer with a hint."""
    try:
        yield
    except Exception as e:
        raise NoAnswer(*_reason(repo, revision, e)) from None


def _reason(repo: str, revision: str, e: BaseException) -> tuple[str, str]:
    """The message, and what to do about it."""
    from huggingface_hub import errors

    if isinstance(e, errors.LocalEntryNotFoundError) and e.__cause__:
        e = e.__cause__  # the hub refused to describe the file
    login = "log in with `hf auth login`, or set HF_TOKEN"
    absent = "not found, or private", f"check the name; if it is private, {login}"
    kinds = {  # the first that fits
        errors.GatedRepoError: (
            "gated: its owner gives access to those who accept the terms",
            f"accept them on the repository's page, then {login}",
        ),
        errors.RevisionNotFoundError: (f"no revision {revision}", "@main is the newest"),
        errors.RepositoryNotFoundError: absent,
        errors.HFValidationError: ("not the name of a repository", "it is org/repo"),
    }
    statuses = {
        401: ("the hub refused the token", login),
        403: ("access denied", f"{login}, with an account that has access"),
        404: absent,
        429: ("the hub refuses: too many requests", f"wait a few minutes, or {login}"),
    }
    status = getattr(getattr(e, "response", None), "status_code", 0)
    fitting = next((text for kind, text in kinds.items() if isinstance(e, kind)), None)
    if text := fitting or statuses.get(status):
        return f"{repo}: {text[0]}", text[1]
    if isinstance(e, OSError) and e.errno in DISK_FULL:
        return f"{repo}: the disk is full", "free some disk space, then pull again"
    if isinstance(e, OSError) and e.filename:
        return f"{e.filename}: {e.strerror}", "check the permissions of the cache"
    what = (str(e).splitlines() or [type(e).__name__])[0]
    hint = "check the network and HF_ENDPOINT, or try again later"
    if isinstance(e, ImportError):  # of a SOCKS proxy
        hint = "pip install socksio, or unset ALL_PROXY"
    return f"{repo}: the hub cannot be reached, or gives no usable answer: {what}", hint
