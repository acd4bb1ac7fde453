"""generate, explain and chat: what they print, where, and how they fail."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import pytest
import tiny as tiny_of
from tiny import write_tiny_gguf

from pyorch import engine, paths
from pyorch.attention.spec import AttentionSpec
from pyorch.engine import library, loading
from pyorch.engine.chat_template import ChatTemplate
from pyorch.errors import SparqError
from pyorch.models import memory

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.usefixtures("native_lib_dir")

LONG = "".join(random.Random(1).choices("abcdefghij klmnopqrstuvwxyz", k=1760))  # as many tokens
SPARSE = ("-a", "sparq,rank=8,topk=64,min_ctx=0")


# ---- generate ----


def test_generate_prints_text_alone_on_stdout(run: Run, tiny: Path) -> None:
    result = run("generate", "-m", tiny, "-p", "hello", "-n", 12)
    assert result.code == 0
    assert "tokens/s" in result.err and "tokens/s" not in result.out
    as_json = json.loads(run("generate", "-m", tiny, "-p", "hello", "-n", 12, "--json").out)
    assert as_json["text"] + "\n" == result.out
    assert len(as_json["tokens"]) <= 12


DEFAULTS = {
    "": "sparq,ratio=0.25",
    "--ratio 1": "dense",
    "-a off": None,
    "--ctx-size 1024": "dense",
}


@pytest.mark.parametrize("line", DEFAULTS)
def test_sparse_unless_told_otherwise(run: Run, tiny: Path, line: str) -> None:
    ask = ("generate", tiny, "-p", LONG[:1020], "--n-predict", 9, "--json", *line.split())
    attention = json.loads((done := run(*ask)).out)["attention"]
    assert (attention and attention["spec"]) == DEFAULTS[line]
    assert ("--ratio 1" in done.err) == (not line)
    assert line or attention["counters"]["calls_sparse"] > 0


def test_a_default_never_fails(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what it keeps does not fit into the memory, attention is exact."""
    kv = json.loads(run("explain", "-m", tiny, "-c", 4096, "--json").out)["kv_memory"]
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(kv + 999))
    ask = ("generate", "-m", tiny, "-p", "x", "-n", 1, "--json")
    assert run(*ask, "--ratio", "1/4").code == 1
    assert json.loads(run(*ask).out)["attention"]["spec"] == "dense"


def test_llama_cpp_is_silent_unless_asked(tiny: Path) -> None:
    args = [sys.executable, "-m", "pyorch", "generate", "-m", tiny, "-p", "x", "-n", "1", "-t", "1"]
    quiet = subprocess.run(args, capture_output=True, check=True).stderr
    loud = subprocess.run([*args, "-v"], capture_output=True, check=True).stderr
    assert b"llama_model_loader" in loud
    assert len(quiet.splitlines()) == 2  # attention, speed


def test_a_drawn_seed_repeats_the_reply(run: Run, tiny: Path) -> None:
    base = ("generate", "-m", tiny, "-p", "hello", "-n", 12, "--temp", 2, "--min-p", 0, "--json")
    first, other = (json.loads(run(*base).out) for _ in range(2))
    assert first["seed"] != other["seed"] and first["tokens"] != other["tokens"]
    assert json.loads(run(*base, "--seed", first["seed"]).out)["tokens"] == first["tokens"]


def test_dense_where_sparse_was_asked_is_told(run: Run, tiny: Path) -> None:
    result = run("generate", "-m", tiny, "-p", "short", "-n", 4, "--ratio", "1/8")
    assert result.code == 0
    assert "note: attention was exact throughout: up to min_ctx 1024" in result.err


@pytest.mark.parametrize(
    ("arch", "asked", "said"),
    [
        ("gemma2", SPARSE, "note: 1 of 2 layers are dense: sliding-window layer"),
        ("deepseek2", SPARSE, "note: attention is dense: multi-head latent attention"),
        ("deepseek2", (), "exact: multi-head latent attention"),
    ],
)
def test_layers_that_cannot_be_sparse_are_told(
    run: Run, tmp_path: Path, arch: str, asked: tuple[str, ...], said: str
) -> None:
    path = tiny_of.write(tmp_path / "m.gguf", arch)
    result = run("generate", "-m", path, "-p", LONG[:300], "-n", 4, *asked)
    assert result.code == 0 and said in result.err
    counted = "attention of 1 of 2 layers " in result.err  # whose bytes these are
    assert counted == (arch == "gemma2")


WRONG_USE = {  # arguments -> what the error or its hint names
    "generate MODEL -p x --ratio 1.5": "ratio 1.5 ",
    "generate MODEL -p x -a sparq --budget ramp": "--budget",
    "generate MODEL -p x --attn spraq": "'spraq'",
    "generate MODEL -p x -a sparq,rank=33,topk=64": "rank 33",
    "generate MODEL -p x --ctx 5000": "context 5000",
    "generate MODEL -p x --threads 513": "--threads",
    "generate MODEL -f -": "the prompt is empty",
    "generate MODEL -p x --contxt 5": "mean --ctx",
    "chat --n-predikt 5": "mean --n-predict",
    "serve --no-kv-ofload": "mean --no-kv-offload",
    "chat llama3-8": "mean llama3-8b",
    "chat -m one two": "one, two",
    "chatt MODEL": "mean chat",
    "clean nothing": "WHAT: 'nothing'",
}


@pytest.mark.parametrize("line", WRONG_USE)
def test_wrong_use_is_two_lines(run: Run, tiny: Path, line: str) -> None:
    result = run(*line.replace("MODEL", str(tiny)).split())
    error, hint = result.err.splitlines()
    assert (result.code, result.out) == (2, "") and WRONG_USE[line] in result.err
    assert error.startswith("error: ") and hint.startswith("hint: ") and len(hint) < 130


def test_layers_on_a_gpu(run: Run, tiny: Path, tmp_path: Path) -> None:
    """The tests' library is for the CPU: every command that takes -ngl and -ts passes them on."""
    text = tmp_path / "text.txt"
    text.write_text("some words")
    for args in (
        ["generate", "-p", "x"],
        ["chat"],
        ["read", text, "-o", tmp_path / "text.kv", "--plain"],
        ["eval", "repetition", "-n", "1", "--ctx", "512", "--out", tmp_path],
    ):
        for option in (("-ngl", "7"), ("-ts", "3,1")):
            result = run(*args, "-m", tiny, *option, stdin="x")
            assert (result.code, result.out) == (2, ""), (args, result.err)
            assert "hint: " in result.err.splitlines()[-1], args
    assert run("generate", "-m", tiny, "-p", "x", "-n", "1", "-ngl", "0").code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep no such limit")
def test_a_limit_of_the_address_space(tiny: Path) -> None:
    """llama.cpp aborts where it needs a little more than there is."""
    line = shlex.join([sys.executable, "-m", "pyorch", "generate", "-m", str(tiny), "-p", "x"])
    line = f"ulimit -v {500 << 10}; {line}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    *_, error, hint = done.stderr.splitlines()
    assert done.returncode == 1 and str(tiny) in error and "ulimit" in error, done.stderr
    assert hint.startswith("hint: ")


def test_weights_may_exceed_the_memory(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are mapped; only the copy that llama.cpp rearranges for its kernels has to fit."""
    seen = []
    found = library()
    real = found.lib.llama_model_load_from_file

    def load(path: bytes, params: Any) -> Any:
        seen.append(params.use_extra_bufts)
        return real(path, params)

    monkeypatch.setattr(found.lib, "llama_model_load_from_file", load)
    line = ("generate", "-m", tiny, "-p", "x", "-n", 2, "--ctx", 512)
    whole = run(*line)
    assert whole.code == 0 and "do not fit" not in whole.err
    monkeypatch.setattr(memory, "weight_bytes", lambda file: 1 << 40)
    monkeypatch.setattr(loading, "weight_bytes", lambda file: 1 << 40)
    large = run(*line)
    assert large.code == 0 and large.out == whole.out and "1 TiB" in large.err
    assert seen == [True, False]


def test_a_context_beyond_the_training(run: Run, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "m.gguf", n_ctx=512)
    scaled = ("-m", model, "--ctx", 1024, "--rope-scaling", "linear", "--rope-scale", 2)
    result = run("generate", *scaled, "-p", LONG[:800], "-n", 4, "--json", *SPARSE)
    assert result.code == 0
    assert "note: context 1024 is beyond the 512 positions" in result.err
    assert json.loads(result.out)["share_sparse"] == 1
    assert run("chat", *scaled, "-n", 2, stdin="hello\n").code == 0
    refused = run("bench", "-m", model, "-d", 1024, "-n", 2)
    assert refused.code == 2 and "512 positions" in refused.err


@pytest.mark.parametrize("args", ["models", "--help", "explain --json", "generate -p x -a off"])
def test_nowhere_to_write(tiny: Path, args: str) -> None:
    verb, *rest = args.split()
    argv = [sys.executable, "-m", "pyorch", verb, *rest]
    argv += ["-m", str(tiny)] * (verb in ("explain", "generate"))
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True)
    want = "error: No space left on device\nhint: free some disk space, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (1, want)


# ---- explain ----


def test_explain_says_which_lengths_fit(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("explain", "-m", tiny, "--ratio", "1/8")
    by = {x["positions"]: x for x in json.loads(run(*args, "--json").out)["lengths"]}
    assert by[8192]["fits"] and by[8192]["beyond_training"]  # it was trained on 4096
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(100 << 20))
    fits = [x["fits"] for x in json.loads(run(*args, "--json").out)["lengths"]]
    assert fits == [True] * 4 + [False] * 2  # from its own 4096 on


# ---- chat ----


def test_chat_through_a_pipe(run: Run, tiny_chat: Path) -> None:
    result = run("chat", "-m", tiny_chat, "-n", 8, "--temp", 0, stdin="hello\n\nand you?\n/stats\n")
    assert result.code == 0
    assert result.out.endswith("\n") and "tokens/s" in result.err
    again = run("chat", "-m", tiny_chat, "-n", 8, "--temp", 0, "--json", stdin="hello\nand you?\n")
    replies = [json.loads(line) for line in again.out.splitlines()]
    assert "".join(r["reply"] + "\n" for r in replies) == result.out
    assert replies[1]["prefill_tokens"] < replies[0]["prefill_tokens"] + 40  # history is cached


def test_chat_commands(run: Run, tiny_chat: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    (tmp_path / "text.txt").write_text("a text")
    script = (
        f"forget me\n/clear\n{LONG}\n/ratio 1/4\nand?\n/stats\n/dense\n/read {tmp_path}/text.txt\n"
    )
    script += f"again\n/help\n/save {file}\n/exit\nnever read\n"
    ask = ("chat", "-m", tiny_chat, "-n", 6, "-a", "off", "--json", "--system", "be brief")
    result = run(*ask, stdin=script)
    assert result.code == 0
    for text in ("/save FILE", "6 tokens"):
        assert text in result.err
    _, off, sparse, dense = [json.loads(line)["attention"] for line in result.out.splitlines()]
    assert off is None and sparse["spec"] == "sparq,ratio=0.25"
    assert sparse["counters"]["calls_sparse"] > 0 == dense["counters"]["calls_sparse"]
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system"] + ["user", "assistant"] * 3
    assert [m["content"] for m in messages[3::2]] == ["and?", "a text\n\nagain"]
    assert run("chat", "-m", tiny_chat, "-n", 4, "--resume", file, stdin="more\n").code == 0
    resumed = ("chat", "-m", tiny_chat, "-n", 4, "--resume", file, "--system", "be long")
    assert run(*resumed, stdin=f"more\n/save {file}\n").code == 0
    messages = json.loads(file.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "system"] == ["be long"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["talk.json", "text.txt"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_read_outlives_a_message_without_a_reply(
    tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Stopped while it is read, or refused; and then it is still kept."""
    from pyorch.cli import chat, conversation

    kept = tmp_path / "texts"
    monkeypatch.setattr(paths, "kept_texts", lambda: kept)
    (tmp_path / "text.txt").write_text("a text of some length " * 60)
    with engine.load(tiny_chat, n_threads=1) as s:
        own = chat.Chat(s, ChatTemplate(s), AttentionSpec(), engine.Sampling(), 4, True, False)
        conversation.read(own, tmp_path / "text.txt")
        text = own.text
        with monkeypatch.context() as m:
            if fails:
                m.setattr("pyorch.engine.generation.prefill", refuse)
                with pytest.raises(SparqError):
                    chat._reply(own, "one")
            else:
                m.setattr(chat, "_interruptible", lambda _: nullcontext(lambda: True))
                chat._reply(own, "one")
        assert (own.text, own.read, own.messages) == (text, [], [])
        assert not kept.exists()
        chat._reply(own, "two")
    assert own.messages[0]["content"] == text + "two" and len(list(kept.iterdir())) == 1


def refuse(*_: object, **__: object) -> None:
    raise SparqError("no")


@pytest.mark.parametrize(
    ("line", "code", "name"),
    [
        ("/ratio 9", 2, "ratio 9"),
        ("/etc/hosts is a file", 2, "/etc/hosts"),
        ("/save", 2, "/save"),
        ("/read /none", 1, "/none"),
        ("/read /dev/null", 1, "/dev/null"),
        ("/read a\0b", 2, "NUL"),
        ("/save /none/x.json", 2, "/none"),
        (LONG * 3, 1, "context"),
    ],
)
def test_chat_errors(run: Run, tiny_chat: Path, line: str, code: int, name: str) -> None:
    result = run("chat", "-m", tiny_chat, "-n", 4, stdin=line + "\n")
    assert result.code == code and name in result.err and "hint:" in result.err


def test_a_pipe_has_no_commands_unasked(
    run: Run, tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines may be of others, and would read and write files."""
    monkeypatch.delenv("SPARQ_CHAT_COMMANDS")
    script = f"/save {tmp_path}/a\n//b\n"
    done = run("chat", "-m", tiny_chat, "-n", 1, "--json", stdin=script)
    assert done.code == 0 and len(done.out.splitlines()) == 2 and not list(tmp_path.iterdir())
    assert done.err.count("--commands") == 1
    assert run("chat", "-m", tiny_chat, "-n", 1, "--commands", stdin=f"hi\n{script}").code == 0
    said = json.loads((tmp_path / "a").read_text())["messages"]
    assert said[0]["content"] == "hi"


def test_chat_resume_errors(run: Run, tiny_chat: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    parts = '{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}'
    role = '{"messages": [{"role": "tool", "content": "42"}]}'  # a transcript has no name for it
    for content in ("{", "[]", '{"messages": [1]}', parts, role):
        bad.write_text(content)
        result = run("chat", "-m", tiny_chat, "--resume", bad, stdin="x\n")
        assert result.code == 1 and "not a saved conversation" in result.err


def test_a_full_context_is_not_read_again_at_each_message(
    run: Run, tiny_chat: Path, tmp_path: Path
) -> None:
    """And what was read before the first message not at all."""
    (tmp_path / "text.txt").write_text("a text " * 30)
    script = f"/read {tmp_path}/text.txt\n" + "a message of 32 letters, no more\n" * 30
    ask = ("chat", "-m", tiny_chat, "--ctx", 1024, "--temp", 0, "--json")
    result = run(*ask, "-n", 16, stdin=f"{script}/save {tmp_path}/talk.json\n")
    assert result.code == 0, result.err
    n_read = [json.loads(line)["prefill_tokens"] for line in result.out.splitlines()]
    assert len(n_read) == 30 and sum(n > 100 for n in n_read[1:]) in range(1, 6)
    assert max(n_read[1:]) < 600 and result.err.count("dropped") == sum(n > 100 for n in n_read[1:])
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert messages[0]["content"].startswith("a text ") and 4 < len(messages) < 40
    # without -n the reply to a text, which stays as long as that, takes half of the room
    done = run(*ask, stdin=f"/read {tmp_path}/text.txt\nand?\n")
    assert json.loads(done.out)["finish"] == "length"
    # and one to a message has room as well
    done = run(*ask, "--resume", tmp_path / "talk.json", stdin=("a " * 200 + "\n") * 3)
    pieces = [len(json.loads(line)["reply"]) for line in done.out.splitlines()]
    assert min(pieces) > 100, pieces


@contextmanager
def chat_on_a_terminal(
    model: Path, here: Path, *args: object, **streams: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """chat on a terminal of its own, except for the `streams` that are given, with its history in
    `here`; and the other end of the terminal. It is killed after a minute."""
    code = f"""if True:
        import os, types, pathlib, pyorch.cli
        from pyorch.cli import chat, line_editor
        os.open(os.ttyname(0), os.O_RDWR)  # Ctrl-C comes from the terminal that a session has
        here = pathlib.Path({str(here)!r})
        line_editor.paths = types.SimpleNamespace(cache=lambda: here, expanded=pathlib.Path)
        chat.paths = line_editor.paths
        pyorch.cli.main()"""
    argv = [sys.executable, "-c", code, "chat", "-m", str(model), "-t", "1", *map(str, args)]
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | streams
    env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody answers one
    with subprocess.Popen(argv, **streams, env=env, start_new_session=True) as child:
        os.close(theirs)
        (timer := Timer(60, child.kill)).start()
        yield child, ours
    timer.cancel()
    os.close(ours)


def read_until(terminal: int, mark: bytes) -> bytes:
    """What shows until the mark; a `> ` in it is a prompt, with what the terminal is told then."""
    said, mark = b"", mark.replace(b"> ", rb"\?2004h.*>")
    while not re.search(mark, said, re.DOTALL):
        said += os.read(terminal, 4096)
    return said


def type_into(terminal: int, *steps: tuple[bytes, bytes]) -> None:
    """After each mark that shows, what is typed then."""
    for mark, then in steps:
        read_until(terminal, mark)
        time.sleep(0.3)  # the prompt shows before it reads
        os.write(terminal, then)


def test_chat_in_a_terminal(tiny_chat: Path, tmp_path: Path) -> None:
    """A pasted text is one message, Alt-Enter begins a line of it, and bytes that are not UTF-8 end
    neither it nor the program; what is too long leaves the conversation; Tab completes; what was
    typed is kept, for nobody else to read."""
    os.mkfifo(tmp_path / "pipe")
    talk, before = tmp_path / os.fsdecode(b"caf\xe9.json"), os.umask(0o022)
    with chat_on_a_terminal(tiny_chat, tmp_path, "-n", 4, "--ctx", 512) as (child, terminal):
        type_into(
            terminal,
            (b"> ", b"\x1b[200~caf\xe9\ntwo\x1b[201~\x1b\rthree\r"),
            (b"read as Windows-1252.*tokens/s.*> ", b"long " * 600 + b"\n"),
            (b"error: .*> ", b"\x03"),
            (b"/exit or Ctrl-D leaves.*> ", f"/read {tmp_path}/pipe\n".encode()),
            (rb"\?2004l", b"\x03"),  # it waits for somebody who writes
            (b"stopped.*> ", b"\x03"),
            (b"/exit or Ctrl-D leaves.*> ", b"/sa\t"),
            (b"ve", b" " + os.fsencode(talk) + b"\r"),
            (b"2 messages written.*> ", b"\x04"),
        )
    os.umask(before)
    assert child.returncode == 0
    assert json.loads(talk.read_text())["messages"][0]["content"] == "café\ntwo\nthree"
    kept = [tmp_path / "chat_history", tmp_path / "chat_last.json"]
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600] * 2
    assert "+two\n+three\n" in kept[0].read_text() and "/save" in kept[0].read_text()


def test_what_is_typed_is_not_kept_unasked(tiny_chat: Path, tmp_path: Path) -> None:
    with chat_on_a_terminal(tiny_chat, tmp_path, "-n", 4, "--no-keep") as (child, terminal):
        type_into(terminal, (b"> ", b"hello\n"), (b"tokens/s.*> ", b"\x04"))
    assert child.returncode == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_reply_in_a_terminal(
    tiny_chat: Path, tmp_path: Path, number: int
) -> None:
    """And all but Ctrl-C the program. The reply, which goes on to the end of the context, goes to a
    file, and nothing else does; so much of it as there is can be resumed."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("it is ignored here, as under nohup, and then by chat too")
    ends = 0 if number == signal.SIGINT else 128 + number
    with (tmp_path / "out").open("wb+") as out:
        streams = {"stdout": out.fileno()}
        with chat_on_a_terminal(tiny_chat, tmp_path, "--temp", 0, **streams) as (child, terminal):
            type_into(terminal, (b"> ", b"hello\n"))
            while not out.seek(0, os.SEEK_END):
                time.sleep(0.01)
            child.send_signal(number)
            if not ends:
                assert b"(stopped)" in read_until(terminal, b"tokens/s.*> ")
                os.write(terminal, b"\x04")
        out.seek(0)
        reply = out.read().decode()
    assert child.returncode == ends
    messages = json.loads((tmp_path / "chat_last.json").read_text())["messages"]
    assert reply.strip() in messages[1]["content"] and len(reply) < 4096
    with chat_on_a_terminal(tiny_chat, tmp_path, "--resume", "last") as (child, terminal):
        read_until(terminal, b"2 messages.*> ")
        child.send_signal(number) if ends else os.write(terminal, b"\x04")
    assert child.returncode == ends


def test_ctrl_c_ends_what_reads_from_a_pipe(tiny_chat: Path) -> None:
    argv = [sys.executable, "-m", "pyorch", "chat", "-m", str(tiny_chat), "-t", "1", "-a", "off"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(argv, **streams, bufsize=0) as child:
        assert child.stdin and child.stdout and child.stderr
        child.stdin.write(b"hello\nand you?\n")
        assert child.stdout.read(1), child.stderr.read()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err.strip()) == (130, b"interrupted")
