"""What people give, however it is written and named, and by whichever way it comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny import CHATML, write_tiny_gguf

from pyorch import engine
from pyorch.engine import document_file
from pyorch.errors import SparqError

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.usefixtures("native_lib_dir")

TEXT = "The red kettle stands in the tower. Café is open.\n\nAnd now?"


def given_to_generate(
    run: Run, patch: pytest.MonkeyPatch, *args: object, stdin: bytes = b""
) -> Any:
    seen: list[object] = []
    patch.setattr("pyorch.cli.generate._generate", lambda s, prompt, *a, **k: seen.append(prompt))
    done = run("generate", *args, stdin=stdin)
    assert done.code == 0, done.err
    return seen[0]


WAYS = ("-f FILE", "-f -", "-p", "read FILE", "read -", "read DIR", "/read", "chat", "eval")


@pytest.mark.parametrize("way", [*WAYS, "--resume"])
def test_one_text_by_every_way_in(
    run: Run,
    tiny: Path,
    tiny_chat: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """All use the one decoder (tests/test_text_file.py): of UTF-16, where bytes may be 0."""
    coding = "cp1252" if way == "-p" else "utf-16"
    raw, out = TEXT.encode(coding), tmp_path / "out"
    (tmp_path / "in").mkdir()
    (file := tmp_path / "in/text.txt").write_bytes(raw)
    found: object = None
    asks = {"-f FILE": ("-f", file), "-f -": ("-f", "-"), "-p": ("-p", os.fsdecode(raw))}
    if way in asks:
        found = given_to_generate(run, monkeypatch, "-m", tiny, *asks[way], stdin=raw)
    elif way.startswith("read"):
        name = {"FILE": file, "-": "-", "DIR": file.parent}[way.partition(" ")[2]]
        done = run("read", name, "-m", tiny_chat, "-o", out, stdin=raw)
        assert done.code == 0, done.err
        found = document_file.content(document_file.load(out))[1]
    elif way == "/read":
        done = run("chat", "-m", tiny_chat, "-n", 1, stdin=f"/read {file}\nx\n/save {out}\n")
        assert done.code == 0, done.err
        found = json.loads(out.read_bytes())["messages"][0]["content"].removesuffix("\n\nx")
    elif way == "chat":  # each line is a message
        done = run("chat", "-m", tiny_chat, "-n", 1, stdin=f"{TEXT}\n/save {out}\n".encode(coding))
        assert done.code == 0, done.err
        messages = json.loads(out.read_bytes())["messages"]
        found = "\n\n".join(m["content"] for m in messages if m["role"] == "user")
    elif way == "eval":
        from pyorch.evals.texts import read_texts

        found = read_texts([file])[0]
    elif way == "--resume":
        talk = json.dumps({"messages": [{"role": "user", "content": TEXT}]}, ensure_ascii=False)
        file.write_bytes(talk.encode(coding))
        ask = ("chat", "-m", tiny_chat, "-n", 1, "--resume", file)
        assert run(*ask, stdin=f"x\n/save {out}\n").code == 0
        found = json.loads(out.read_bytes())["messages"][0]["content"]
    assert found == TEXT


def test_what_was_assumed_is_said_once(run: Run, tiny_chat: Path, tmp_path: Path) -> None:
    (file := tmp_path / "old.txt").write_bytes("Café".encode("cp1252"))
    done = run("read", file, "-m", tiny_chat)
    assert f"{file}: not UTF-8, read as Windows-1252" in done.err
    lines = "é\ne\né\n".encode("cp1252")
    done = run("chat", "-m", tiny_chat, "-n", 1, stdin=lines)
    assert done.code == 0 and done.err.count("stdin: not UTF-8, read as Windows-1252") == 1


def test_a_folder_leaves_nothing_out_without_a_word(
    run: Run, tiny_chat: Path, tmp_path: Path
) -> None:
    (folder := tmp_path / "notes").mkdir()
    (folder / "a.txt").write_text("first")
    (folder / "b.txt").write_bytes("zweitens, größer".encode("utf-16"))
    (folder / "picture").write_bytes(b"\x89PNG\0\xff")
    (folder / ".git").mkdir()
    (folder / ".git/c.txt").write_text("never")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    done = run("read", folder, "-m", tiny_chat)
    assert done.code == 0, done.err
    text = document_file.content(document_file.load(document_file.find("notes")))[1]
    assert text == "File: a.txt\n\nfirst\n\nFile: b.txt\n\nzweitens, größer"
    assert "4 that are no texts" in done.err
    assert all(name in done.err for name in ("picture", ".git", "linked", "gone"))


ODD = os.fsdecode(b"caf\xe9")  # a name in Latin-1, as old archives have them


def program(*args: object, **more: Any) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "pyorch", *map(str, args)]
    return subprocess.run(argv, capture_output=True, **more)


def test_names_that_are_not_utf8(tiny_chat: Path, tmp_path: Path) -> None:
    def good(*args: object, stdin: str = "") -> bytes:
        env = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "SPARQ_CHAT_TOKENS": "1"}
        env["SPARQ_CHAT_COMMANDS"] = "1"
        done = program(*args, input=os.fsencode(stdin), env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (folder := tmp_path / ODD).mkdir()
    model = folder / f"{ODD}.gguf"
    model.symlink_to(tiny_chat)
    (folder / f"{ODD}.txt").write_text("a text")
    (folder / "b.txt").write_text("another")
    kept = Path(json.loads(good("read", folder, "-m", model, "--json"))["path"])
    assert kept.name == f"{ODD}.kv" and kept.exists()
    about = document_file.load(kept)
    assert (about.name, about.model) == ("caf\ufffd", "caf\ufffd.gguf")
    text = document_file.content(about)[1]
    assert text.startswith("File: b.txt\n\nanother\n\nFile: caf\ufffd.txt\n")
    for args in (("list",), ("list", "--json"), ("show", kept), ("verify", kept)):
        good("documents", *args)
    talk = folder / f"{ODD}.json"
    script = f"/document {kept}\n/read {folder / ODD}.txt\nx\n/save {talk} kv\n/stats\n"
    good("chat", "-m", model, "--document", kept, stdin=script)
    assert talk.exists() and talk.with_name(talk.name + ".kv").exists()
    good("chat", "-m", model, "--resume", talk, stdin="x\n")
    listed = document_file.listed([about])  # for llama-server
    assert os.fsencode(listed).splitlines()[0] == os.fsencode(kept)
    good("documents", "rm", kept, "--yes")
    assert not kept.exists()


def test_text_that_nobody_reads_is_told(tiny: Path, tmp_path: Path) -> None:
    ask = ("generate", "-m", tiny, "-n", 1, "-t", 1, "-p", "hi")
    assert b"-f -" in program(*ask, input=b"and a text").stderr
    assert b"-f -" not in program(*ask, input=b"").stderr


def test_a_pipe_of_a_shell_has_a_name(tiny: Path, tmp_path: Path) -> None:
    line = f"{sys.executable} -m pyorch read -m {tiny} --plain <(echo a text)"
    done = shell(f"bash -c '{line}'", XDG_DATA_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.rglob("*.kv")] == ["pipe.kv"]


# ---- texts that are too long ----


@pytest.mark.parametrize("way", ["-f", "-f -", "read", "/read", "chat"])
def test_a_text_far_beyond_the_context_is_not_tokenised_to_its_end(
    run: Run,
    tiny_chat: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    lib = engine.library().lib
    sizes, tokenize = [], lib.llama_tokenize

    def watched(vocab: int, raw: bytes, size: int, *rest: Any) -> int:
        sizes.append(size)
        return tokenize(vocab, raw, size, *rest)

    monkeypatch.setattr(lib, "llama_tokenize", watched)
    (file := tmp_path / "long.txt").write_text(text := "word " * 1_000_000)
    args, stdin = {
        "-f": (("generate", "-f", file), ""),
        "-f -": (("generate", "-f", "-"), text),
        "read": (("read", file), ""),
        "/read": (("chat",), f"/read {file}\n"),
        "chat": (("chat",), text),
    }[way]
    done = run(*args, "-m", tiny_chat, stdin=stdin)
    assert done.code in (1, 2) and "4096" in done.err and "hint:" in done.err
    assert 0 < sum(sizes) < len(text) / 10


def test_a_long_run_of_one_character_ends_no_process(tmp_path: Path) -> None:
    """Some tokenisers of llama.cpp call themselves for each of its characters."""
    model = write_tiny_gguf(tmp_path / "m.gguf", chat_template=CHATML, pre="gpt-4o")
    (file := tmp_path / "run.txt").write_text("Z" * 130_000)
    done = program("generate", "-m", model, "-f", file)
    assert done.returncode in (1, 2) and b"hint:" in done.stderr, done.stderr
    with engine.load_model(model) as m:
        assert len(engine.tokenize(m, "Z" * 40_000, add_special=False)) == 40_000
        with pytest.raises(SparqError):
            engine.tokenize(m, "Z" * 2_500_000)


# ---- streams that are closed ----


def shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, shell=True, capture_output=True, text=True, env={**os.environ, **env}
    )


def test_closed_streams_are_open_in_children() -> None:
    """All three, so that no file of a child's takes their number either."""
    look = "import os; [os.fstat(i) for i in range(3)]; os._exit(7)"
    code = f"""if True:
        import subprocess, sys
        from pyorch.cli import streams
        streams.prepare()
        sys.exit(subprocess.run([sys.executable, '-c', '{look}']).returncode)"""
    assert shell(f'{sys.executable} -c "{code}" <&- >&- 2>&-').returncode == 7
