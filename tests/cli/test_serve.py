"""serve: llama-server as a child of ours.

How it is looked after is tested with a stand-in, a script that needs no build and misbehaves as it
is told; what it answers, with the real one.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny as tiny_models
from server import answered, gone
from tiny import CHATML, write_tiny_gguf

from pyorch.cli.serve import Account
from pyorch.models.geometry import geometry
from pyorch.models.gguf_file import read_gguf
from pyorch.models.memory import weight_bytes

STANDIN = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

how = os.environ.get("STANDIN", "")
key = sys.argv.index("--api-key-file") + 1 if "--api-key-file" in sys.argv else 0
keys = open(sys.argv[key]).read().split() if key else []
with open(os.environ["STANDIN_FILE"], "w") as f:
    print(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "env": dict(os.environ), "mask": os.umask(0), "keys": keys}), file=f)

def say(text):
    print(text, file=sys.stderr, flush=True)

def end(*_):
    if how == "deaf":
        return
    say("asked to end")
    say("0.01.000.000 I slot print_timing: id  0 | task 0 | prompt eval time =   8.00 ms /   400 tokens")
    say("0.01.000.000 I slot print_timing: id  0 | task 0 |        eval time =  10.00 ms /    12 tokens")
    say(os.environ["STANDIN_CALLS"])
    sys.exit(0)

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if how == "loading" else 200)
        self.end_headers()

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, end)
server = HTTPServer((sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])), Answer)
server.serve_forever()
"""  # noqa: E501
CALLS = '0.02.0.0 I sparse attention calls: {"sparse": 19, "exact": 1, "left": {}}'
NEVER = CALLS.replace("19", "0")
MAIN = """
import os, sys
from pathlib import Path
from pyorch import native
from pyorch.cli import main, supervise
folder = Path(sys.argv.pop(1))
if "STDERR" in os.environ:
    os.dup2(os.open(os.environ["STDERR"], os.O_WRONLY), 2)
native.built = native.lib_dir = lambda **_: folder
native.check_compiler = lambda *_: None
supervise.GRACE_S = float(os.environ.pop("GRACE_S", supervise.GRACE_S))
main()
"""
READY_S = 60


class Running:
    """`sparq-cpp serve` in a process of its own, with what it says on stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.said, self.url = process, "", ""

    def until_ready(self) -> Running:
        assert self.process.stderr is not None
        while line := self.process.stderr.readline():
            self.said += line
            if " is ready" in line:
                self.url = line.split()[0]
                return self
        raise AssertionError(self.said)

    def end(self, number: int = signal.SIGINT) -> int:
        """Send a signal, if it still runs. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.rest()

    def rest(self) -> int:
        self.said += self.process.communicate(timeout=READY_S)[1]
        assert "Traceback" not in self.said
        return self.process.returncode


@contextmanager
def serving(code: str, *args: object, **env: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1", **env},
        start_new_session=True,
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def standin(tmp_path: Path, tiny: Path) -> Callable[..., Any]:
    """`standin("deaf", "--ctx", 1024)` runs serve on the stand-in; `.started()` tells of it, once
    it has begun."""
    program, file = tmp_path / "llama-server", tmp_path / "started"
    code = tmp_path / "standin.py"  # a `#!` line cannot have a path with blanks
    code.write_text(STANDIN)
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(code)])} "$@"\n')
    program.chmod(0o755)

    @contextmanager
    def run(how: str, *args: object, calls: str = CALLS, **env: str) -> Iterator[Any]:
        env |= {"STANDIN": how, "STANDIN_FILE": str(file), "STANDIN_CALLS": calls}
        line = (tmp_path, "serve", "-m", tiny, "--port", 0, *args)
        with serving(MAIN, *line, **env) as running:
            yield running

    def started() -> Any:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            with suppress(OSError, ValueError):  # not yet, or not all of it
                return json.loads(file.read_text())
            time.sleep(0.02)
        raise AssertionError("it did not begin")

    run.started = started  # type: ignore[attr-defined]
    return run


def after(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


# ---- how it is looked after ----


def test_the_line_of_llama_server(standin: Any, tmp_path: Path) -> None:
    """Slots with a cache each, and nothing that opens a door: neither a key where others see it nor
    a variable from elsewhere."""
    os.mkfifo(key := tmp_path / "keys", 0o600)  # as <(...) of a shell is: it can be read once
    keys = "# of the tests\nsecret\n"
    threading.Thread(target=key.write_text, args=[keys], daemon=True).start()
    line = ("--ratio", "1/8", "--ctx", 2048, "-np", 3, "-t", 1, "-ctk", "q8_0", "--numa", "isolate")
    rope = ("--rope-scaling", "yarn", "--rope-scale", 2, "--yarn-orig-ctx", 4096, "-nr", "-nkvo")
    rope += ("--rope-freq-base", 20000)
    env = {"LLAMA_ARG_TOOLS": "all", "AIP_MODE": "PREDICTION", "SPARQ_ATTN": "topk,k=8"}
    env |= {"SPARQ_PROMPT_ON_CPU": "1"}
    more = ("--", "--metrics", "--lora", "x.gguf")
    with standin("", *line, *rope, "--api-key-file", key, *more, **env) as running:
        running.until_ready()
        started = standin.started()
        assert running.end() == 0
    argv = started["argv"]
    assert after(argv, "--ctx-size") == "6144" and after(argv, "--parallel") == "3"
    assert after(argv, "--batch-size") == after(argv, "--ubatch-size") == "512"
    assert "--no-kv-unified" in argv and after(argv, "--sparse-attn") == "sparq,ratio=1/8"
    assert after(argv, "--cache-type-k") == "q8_0" and after(argv, "--cache-type-v") == "f16"
    assert after(argv, "--rope-scaling") == "yarn" and after(argv, "--rope-freq-scale") == "0.5"
    assert after(argv, "--rope-freq-base") == "20000.0"
    assert after(argv, "--yarn-orig-ctx") == "4096" and after(argv, "--numa") == "isolate"
    assert {"--no-slots", "--no-repack", "--no-kv-offload"} < set(argv)
    assert after(argv, "--cors-origins") == "localhost"
    assert after(argv, "--timeout") == "60" and argv[-3] == "--metrics"
    assert after(argv, "--cache-ram") == "0", "it does not know the adapters of earlier prompts"
    assert argv.count("--api-key-file") == 2 and started["keys"] == ["secret"]
    assert "secret" not in f"{argv} {started['env']} {running.said}"
    assert started["mask"] == 0o077, "slots and logs that it writes are made of what people asked"
    foreign = {k for k in started["env"] if k.startswith(("LLAMA_", "AIP_", "SPARQ_"))}
    assert foreign == {"SPARQ_PROMPT_ON_CPU", "SPARQ_NO_CONFIG"}
    assert "--no-cache-idle-slots" not in argv, "there is no document"
    first, ready, account = running.said.splitlines()
    assert "sparq,ratio=1/8, 2048 positions" in first
    assert re.match(r"http://127\.0\.0\.1:\d+/v1 ", ready)
    assert "12 tokens" in account and "95.0 %" in account


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_once(standin: Any, number: int) -> None:
    """A terminal sends it to the whole group of processes, and llama-server takes two as an order
    to drop everything."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("it is ignored here, as under nohup, and then by serve too")
    with standin("", "-v") as running:
        running.until_ready()
        os.killpg(running.process.pid, number)
        assert running.rest() == 0
    assert running.said.count("asked to end") == 1 and gone(standin.started()["pid"])


def test_a_signal_while_it_loads(standin: Any) -> None:
    with standin("loading", "-v") as running:
        standin.started()
        time.sleep(0.5)
        assert running.end(signal.SIGTERM) == 0
    assert "ready" not in running.said


@pytest.mark.parametrize(("grace", "signals"), [(0.5, 1), (1000, 2)])
def test_one_that_does_not_end_is_killed(standin: Any, grace: float, signals: int) -> None:
    """At once by a second signal, and then nobody waited for so long."""
    with standin("deaf", GRACE_S=str(grace)) as running:
        running.until_ready()
        pid = standin.started()["pid"]
        for _ in range(signals):
            running.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert running.rest() == 0
    assert "was killed" in running.said and gone(pid) and "1000" not in running.said


@pytest.mark.parametrize("env", [{}, {"STDERR": "/dev/full"}], ids=["gone", "full"])
def test_nobody_reads_what_it_says(standin: Any, env: dict[str, str]) -> None:
    with standin("", **env) as running:
        running.process.stderr.close()
        running.process.stderr = None
        where = ("127.0.0.1", int(after(standin.started()["argv"], "--port")))
        with socket.socket() as client:
            while client.connect_ex(where):
                time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(2)
        running.process.terminate()
        assert running.process.wait(READY_S) == 0


def test_a_name_that_the_system_cannot_spell(standin: Any, tiny: Path, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le.gguf")
    os.link(tiny, name)
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with standin("", "-m", name, **ascii_alone) as running:
        running.until_ready()
        assert running.end() == 0


def test_a_file_of_options_is_not_read(standin: Any, tmp_path: Path) -> None:
    """Its options would be what nothing here knows of, such as an adapter."""
    (file := tmp_path / "llama.cpp" / "config.ini").parent.mkdir()
    file.write_text("lora = x.gguf\n")
    with standin("", XDG_CONFIG_HOME=str(tmp_path)) as running:
        assert str(file) in running.until_ready().said
        assert "SPARQ_NO_CONFIG" in standin.started()["env"]


def test_replies_that_were_all_exact_are_told(standin: Any) -> None:
    left = NEVER.replace("{}", '{"a sliding window": 4}')
    for calls, why in ((NEVER, "min_ctx 1024"), (left, "a sliding window")):
        with standin("", "--ratio", "1/8", "--ctx", 512, calls=calls) as running:
            assert "exact at 512 positions" in running.until_ready().said
            assert running.end() == 0
        assert why in running.said.rpartition("is ready")[2] and " 0.0 % of" in running.said


# ---- what is refused before it starts ----


def test_a_port_in_use(run: Callable[..., Any], tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("serve", "-m", tiny, "--port", other.getsockname()[1])
    assert result.code == 1 and "127.0.0.1:" in result.err and "--port 0" in result.err
    result = run("serve", "-m", tiny, "--host", "256.1.1.1")
    assert result.code == 1 and "256.1.1.1" in result.err and "hint:" in result.err


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_need_a_key(run: Callable[..., Any], tiny: Path, host: str) -> None:
    result = run("serve", "-m", tiny, "--host", host)
    error, hint = result.err.splitlines()
    assert result.code == 2 and f"--host {host}" in error
    assert "--api-key-file" in hint and "--insecure" in hint


def test_keys_come_in_a_file(run: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    line = ("serve", "-m", tiny, "--port", 0, "--api-key-file", keys)
    result = run(*line)
    assert result.code == 1 and "keys: No such file" in result.err
    for text in ("", "# none\n\n", "k\r\n", "\ufeffk\n"):
        keys.write_bytes(text.encode())
        result = run(*line)
        assert result.code == 1 and str(keys) in result.err and len(result.err.splitlines()) == 2
    result = run("serve", "-m", tiny, "--api-key", "secret")
    assert result.code == 2 and "--api-key-file" in result.err
    assert "secret" not in result.err


@pytest.mark.parametrize(
    ("more", "ours"),
    [
        ("--gpt-oss-20b-default", "-m"),
        ("--metrics --host 0.0.0.0", "--host"),
        ("--api_key secret", "--api-key-file"),
        ("--api-key=secret", "--api-key-file"),
        ("-kvu", "--ctx"),
        ("--rope-freq-base 20000", "--rope-freq-base"),
    ],
)
def test_our_options_are_not_for_after(
    run: Callable[..., Any], tiny: Path, more: str, ours: str
) -> None:
    result = run("serve", tiny, "--", *more.split())
    _, hint = result.err.splitlines()
    assert result.code == 2 and ours in hint and "secret" not in result.err


def test_slots_count_for_the_memory(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(6 << 20))  # one slot of 2 MiB fits, four do not
    result = run("serve", "-m", tiny, "--ctx", 4096)
    assert result.code == 1 and "of memory is available" in result.err
    assert "--parallel" in result.err


def test_a_window_counts_for_the_memory_as_what_it_is(standin: Any, tmp_path: Path) -> None:
    """Five layers of six keep their window of 64 and a batch, in blocks of 256 positions."""
    file = tiny_models.write(tmp_path / "m.gguf", "gemma3", n_layer=6)
    geo = geometry(read_gguf(file))
    row = 2 * 2 * geo.n_head_kv[0] * geo.head_dim_k  # of f16, K and V
    cut, whole = ((5 * n + 4096) * row for n in (768, 4096))
    weights, ctx = weight_bytes(read_gguf(file)), ("-m", file, "-a", "off", "--ctx", 4096, "-np", 1)
    spare = 8 << 20
    room = {"SPARQ_MEMORY_LIMIT": str(cut + weights + spare)}
    with standin("", *ctx, **room) as running:
        running.until_ready()
    assert after(standin.started()["argv"], "--cache-ram") == str(spare // 2 >> 20)
    room = {"SPARQ_MEMORY_LIMIT": str(whole - 1)}
    with standin("", *ctx, **room) as running:
        running.until_ready()
    with standin("", *ctx, "--", "--swa-full", **room) as running:
        assert running.rest() == 1 and "for the cache" in running.said


# ---- the real one ----


REAL = "from pyorch.cli import main; main()"
SPARSE = ("-a", "sparq,ratio=1/8,min_ctx=0", "--ctx", "1024", "-t", "1", "-np", "2")
PROMPT = {"prompt": "It was a dark night. " * 30, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(
    server_dir: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("key-of-test\nother\n")
    keys.chmod(0o600)
    line = ("serve", "-m", demo_model, "--port", 0, "--api-key-file", keys, *SPARSE)
    with serving(REAL, *line) as running:
        yield running.until_ready()


def asked(url: str, value: Any = None, key: str = "other") -> Any:
    return json.loads(answered(url, value, Authorization=f"Bearer {key}")[1])


def refused(*args: Any) -> tuple[int, str]:
    """The status and the text of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        asked(*args)
    with caught.value as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("key", ["", "wrong", "# of the tests"])
def test_a_wrong_key(server: Running, key: str) -> None:
    code, text = refused(f"{server.url}/completions", PROMPT, key)
    assert code == 401 and "other" not in text
    assert asked(server.url.removesuffix("/v1") + "/health", None, "") == {"status": "ok"}


def test_what_is_closed(server: Running) -> None:
    """Neither what others ask nor settings nor tools, and no web page elsewhere reads replies."""
    base = server.url.removesuffix("/v1")
    for path in ("slots", "props", "tools", "cors-proxy"):
        value = {"x": 1} if path == "props" else None
        assert refused(f"{base}/{path}", value)[0] in (403, 501), path
    here, key = "http://localhost:3000", "Bearer other"
    for origin, allowed in (("http://example.org", None), (here, here)):
        headers, _ = answered(f"{server.url}/models", Origin=origin, Authorization=key)
        assert headers["Access-Control-Allow-Origin"] == allowed


def test_a_document_of_another_day_beyond_the_training(server_dir: Path, tmp_path: Path) -> None:
    """It can be asked, although its template states the day: there is room for the question without
    --ctx."""
    from pyorch import engine
    from pyorch.engine.chat_template import ChatTemplate

    text = "It was a dark night. " * 220
    rope = engine.Rope("linear", freq_scale=0.5)
    dated = "{{ 'it is ' + strftime_now('%d %b %Y') }}" + CHATML
    model = write_tiny_gguf(tmp_path / "dated.gguf", chat_template=dated)
    with engine.load(model, n_threads=1, n_ctx=5120, rope=rope) as session:
        template = ChatTemplate(session, now=dt.datetime(2025, 1, 2))
        reading = engine.Reading("night", text)
        engine.read_document(session, tmp_path / "night.kv", reading, template)
    line = ("serve", "-m", model, "--port", 0, "-t", 1, "-np", 1, "--document")
    rope_line = ("--rope-scaling", "linear", "--rope-scale", 2)
    with serving(REAL, *line, tmp_path / "night.kv", *rope_line) as running:
        url = running.until_ready().url
        props = asked(url.removesuffix("/v1") + "/props")
        assert props["default_generation_settings"]["n_ctx"] >= len(text) + 4096
        body = {"messages": reading.messages("Why?"), "max_tokens": 2}
        for _ in range(2):
            answer = asked(f"{url}/chat/completions", body)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 4600
        assert running.end() == 0
    assert "prompts that began with a document: 2" in running.said


def test_it_ends_and_says_what_ran(server: Running) -> None:
    """The last of those that share a server: it is ended here."""
    (model,) = asked(f"{server.url}/models")["data"]
    assert model["id"] == "demo.gguf" and model["meta"]["n_ctx"] == 1024
    answer = asked(f"{server.url}/completions", PROMPT)
    assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"]
    assert server.end() == 0
    account = re.match(r"(\d+) tokens decoded, ([\d.]+) %", server.said.splitlines()[2])
    assert account and int(account[1]) >= 8 and float(account[2]) > 50


def test_the_log_keeps_keys(server_dir: Path, tiny: Path, tmp_path: Path) -> None:
    """llama-server logs the end of a key: with -v on our stderr, with --log-file on disk."""
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("secret")
    keys.chmod(0o600)
    line = ("serve", "-m", tiny, "--port", 0, "--api-key-file", keys, "-t", 1, "--ctx", 512, "-v")
    with serving(REAL, *line, "--", "--log-file", log) as running:
        running.until_ready()
        asked(f"{running.url}/completions", PROMPT | {"prompt": "x"}, "secret")
        assert running.end() == 0
    assert "api_keys: " in running.said  # it would be in this line
    for text in (running.said, log.read_text()):
        assert "cret" not in text.replace(str(keys), "")


def test_the_account_tells_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    """A document that cannot be used costs the time to read, so somebody is told at once."""
    account, head = Account(), "0.00.1 I sparse document:"
    for _ in range(2):
        account.read(f"{head} used /d.kv: 4000 tokens of the prompt were read before")
        account.read(f"{head} unused /d.kv: the document is shorter")
        account.read(f"{head} unused /d.kv: read otherwise")
    assert account.opened == 2
    shorter, otherwise = capsys.readouterr().err.splitlines()  # each is told once
    assert "the document is shorter" in shorter and "read otherwise" in otherwise
