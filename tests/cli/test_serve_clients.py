"""llama-server when one client behaves badly: the others are served, and it ends when it is asked
to."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from server import HANGS_S, ask, complete, events, sent, serving, started

LINE = ("-t", 1, "-c", 2048, "-np", 2, "--slots", "--context-shift")
LONG = {"prompt": "It was a dark night.", "n_predict": -1, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(server_dir: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(server_dir, tmp_path_factory.mktemp("log") / "log", "-m", tiny, *LINE) as url:
        yield url


def waiting(url: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """The connection of a client that waits for a whole reply."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HANGS_S)
    connection.request("POST", "/completion", json.dumps(body))
    return connection


def busy(url: str) -> int:
    return sum(slot["is_processing"] for slot in ask(f"{url}/slots"))


def until_busy(url: str, n: int) -> None:
    end = time.monotonic() + HANGS_S
    while busy(url) != n:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_clients_who_never_finish_asking(url: str) -> None:
    """More than there are threads, and at once."""
    where = urlsplit(url)
    with ExitStack() as stack:
        for _ in range(200):
            client = stack.enter_context(socket.create_connection((where.hostname, where.port)))
            client.sendall(b"POST /completion HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert ask(f"{url}/health") == {"status": "ok"}


def test_a_client_who_leaves_is_not_served_on(url: str) -> None:
    """Although another gets a reply without end meanwhile."""
    other = sent(url, LONG)
    reply = events(other)
    next(reply)
    client = waiting(url, LONG)
    until_busy(url, 2)
    client.close()
    end = time.monotonic() + HANGS_S
    for _ in reply:
        if busy(url) == 1:
            break
        assert time.monotonic() < end
    other.close()
    until_busy(url, 0)
    assert complete(url, "It was", n_predict=2)["tokens_predicted"] == 2


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ask_for", [sent, waiting])
def test_it_ends_although_a_client_waits(
    server_dir: Path, tiny: Path, tmp_path: Path, ask_for: Any, by: int
) -> None:
    """Whatever lock the thread that the signal interrupts holds: so twice."""
    for _ in range(2):
        with started(server_dir, tmp_path / "log", "-m", tiny, *LINE, by=by) as (url, _):
            client = ask_for(url, LONG)
            until_busy(url, 1)
        with closing(client), pytest.raises((http.client.HTTPException, ConnectionError)):
            client.getresponse().read()


def test_a_run_of_one_kind_of_character(server_dir: Path, demo_model: Path, tmp_path: Path) -> None:
    """A pre-tokenizer of upstream's matches it by a function that calls itself for each."""
    other = ("--override-kv", "tokenizer.ggml.pre=str:gpt-4o")
    with serving(server_dir, tmp_path / "log", "-m", demo_model, *LINE, *other) as url:
        for letters in (100_000, 3_000_000):
            try:
                ask(f"{url}/tokenize", {"content": "Z" * letters})
            except urllib.error.HTTPError as error:
                with error:
                    assert error.code == 400 and letters == 3_000_000
        assert ask(f"{url}/health") == {"status": "ok"}


def test_a_text_far_beyond_the_context(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        complete(url, "It was a dark night. " * 300_000)
    with error.value as answer:
        assert answer.code == 400 and b"n_prompt_tokens" not in answer.read(), "nobody counts them"
