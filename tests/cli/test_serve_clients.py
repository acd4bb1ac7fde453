"""llama-server when one client behaves badly: the others are served, and it ends when it is asked
to."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import socket
import sys
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from server import HANGS_S, answered, ask, complete, events, sent, serving, started

LINE = ("-t", 1, "-c", 2048, "-np", 2, "--slots", "--context-shift")
LONG = {"prompt": "It was a dark night.", "n_predict": -1, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(server_dir: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(server_dir, tmp_path_factory.mktemp("log") / "log", "-m", tiny, *LINE) as url:
        yield url


def busy(url: str) -> int:
    return sum(slot["is_processing"] for slot in ask(f"{url}/slots"))


def until_busy(url: str, n: int) -> None:
    end = time.monotonic() + HANGS_S
    while busy(url) != n:
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def crowd(url: str) -> Iterator[None]:
    """Clients who never finish asking, more than there are threads, and at once."""
    where = urlsplit(url)
    with ExitStack() as stack:
        for _ in range(200):
            client = stack.enter_context(socket.create_connection((where.hostname, where.port)))
            client.sendall(b"POST /completion HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        yield


def test_clients_who_never_finish_asking(url: str) -> None:
    with crowd(url):
        assert ask(f"{url}/health") == {"status": "ok"}


@pytest.mark.skipif(sys.platform != "linux", reason="no prlimit")
def test_the_system_has_no_more_threads(server_dir: Path, tiny: Path, tmp_path: Path) -> None:
    """As under `ulimit -v`, or where a container may have few."""
    with started(server_dir, tmp_path / "log", "-m", tiny, *LINE) as (url, pid):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + (128 << 20)  # less than the stack of a thread
        resource.prlimit(pid, resource.RLIMIT_AS, (room, -1))
        with crowd(url):
            time.sleep(0.1)
        resource.prlimit(pid, resource.RLIMIT_AS, (-1, -1))
        assert ask(f"{url}/health") == {"status": "ok"}


def test_a_client_who_leaves_is_not_served_on(url: str) -> None:
    """Although another gets a reply without end meanwhile."""
    other = sent(url, LONG)
    reply = events(other)
    next(reply)
    client = sent(url, LONG, stream=False)
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
@pytest.mark.parametrize("how", [{}, {"stream": False}, {"X-Conversation-Id": "a"}])
def test_it_ends_although_a_client_waits(
    server_dir: Path, tiny: Path, tmp_path: Path, how: Any, by: int
) -> None:
    """Whatever lock the thread that the signal interrupts holds: so twice. A reply with an id, as
    the page asks for, goes on without its client."""
    for _ in range(2):
        with started(server_dir, tmp_path / "log", "-m", tiny, *LINE, by=by) as (url, _):
            client = sent(url, LONG, **how)
            until_busy(url, 1)
        with closing(client), suppress(http.client.HTTPException, ConnectionError):
            assert b"the program ends" in client.getresponse().read()  # or it is cut off


def nested(n: int) -> str:
    return '{"type":"array","items":' * n + "{}" + "}" * n


def schema(text: str) -> str:
    return f'{{"prompt":"It","n_predict":2,"json_schema":{text}}}'


def grammar(text: str) -> str:
    return json.dumps({"prompt": "It", "n_predict": 2, "grammar": f"root ::= {text}"})


BLANKS = "!" * 6_000_000
COSTLY = {
    "levels": schema(nested(60_000)),
    "format": '{"messages":[],"response_format":{"type":"json_schema","json_schema":{"schema":'
    + nested(60_000)
    + "}}}",
    "properties": schema(json.dumps({"properties": {f"p{i}": {} for i in range(3000)}})),
    "name": schema(json.dumps({"properties": {BLANKS: {}}})),
    "ref": schema(json.dumps({"$ref": f"#/$defs/{BLANKS}", "$defs": {BLANKS: {}}})),
    "parentheses": grammar("(" * 3_000_000 + '"a"' + ")" * 3_000_000),
    "repetitions": grammar('"a"{0,2000} ' * 1000),
    "text": json.dumps({"prompt": "It was a dark night. " * 300_000}),
    "messages": json.dumps({"messages": [{"role": "user", "content": "It"}] * 50_000}),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_would_take_minutes_or_end_it_is_refused(url: str, name: str) -> None:
    """llama.cpp works on schemas and grammars by recursion, and in the square of their size."""
    path = "v1/chat/completions" if "messages" in COSTLY[name] else "completion"
    with pytest.raises(urllib.error.HTTPError) as error:
        answered(f"{url}/{path}", COSTLY[name].encode())
    with error.value as answer:
        assert answer.code == 400 and b"n_prompt_tokens" not in answer.read(), "nobody counts them"
    assert complete(url, "It was", n_predict=2)["tokens_predicted"] == 2


def test_rules_that_name_one_twice(url: str) -> None:
    """Upstream walked them 2 ** 60 times."""
    rules = [f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60)]
    asked = grammar("\n".join(["r0", *rules, 'r60 ::= "a"']))
    assert json.loads(answered(f"{url}/completion", asked.encode())[1])["content"] == "a"


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
