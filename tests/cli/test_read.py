"""`read`, `documents`, and the commands that begin with a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny as tiny_models
from tiny import write_tiny_gguf

from pyorch import engine, native, paths
from pyorch.engine import document_file

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.usefixtures("native_lib_dir")

TEXT = "the text that was read once, " * 60  # a token per byte
SPARSE = ("-a", "sparq,rank=8,topk=64,min_ctx=0")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (path := tmp_path / "story.txt").write_text(TEXT)
    return path


def test_read_then_chat(run: Run, tiny_chat: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "story.kv"
    done = run("read", text, "-m", tiny_chat, "-o", out, "--json")
    assert done.code == 0, done.err
    about = json.loads(done.out)
    assert about["path"] == str(out) and about["tokens"] >= len(TEXT)

    ask = ("chat", "-m", tiny_chat, "-n", 8, "--temp", 0, "--json", *SPARSE)
    fresh = run(*ask, "-c", 4096, stdin=f"/read {text}\nwho?\n")
    known = run(*ask, "--document", out, stdin="who?\nand then?\n")
    assert known.code == 0, known.err
    assert "read before" in known.err
    (first,), replies = ([json.loads(line) for line in r.out.splitlines()] for r in (fresh, known))
    assert replies[0]["reply"] == first["reply"]
    assert replies[0]["prefill_tokens"] < 40 < len(TEXT) < first["prefill_tokens"]

    asked = run("generate", "-m", tiny_chat, "--document", out, "-p", "who?", "-n", 8, *SPARSE)
    assert asked.code == 0, asked.err
    assert asked.out.rstrip("\n").lstrip() == first["reply"].rstrip("\n")
    assert "prefill 1" in asked.err or "prefill 2" in asked.err, "of the question alone"


def test_a_text_goes_on_without_a_blank(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SentencePiece puts a blank before a text, but not where one goes on."""
    model = write_tiny_gguf(tmp_path / "blank.gguf", space_prefix=True)
    (tmp_path / "story.txt").write_text(TEXT + "The answer is 4")
    out = tmp_path / "story.kv"
    assert run("read", tmp_path / "story.txt", "-m", model, "--plain", "-o", out).code == 0
    asked, generate = [], engine.generate

    def watched(session: engine.Session, prompt: Any, *args: Any, **options: Any) -> Any:
        asked.append(engine.tokenize(session, prompt) if isinstance(prompt, str) else prompt)
        return generate(session, prompt, *args, **options)

    monkeypatch.setattr(engine, "generate", watched)
    args = ("generate", "-m", model, "-n", 1, "-c", 4096)
    assert run(*args, "--document", out, "-p", "2").code == 0
    assert run(*args, "-p", TEXT + "The answer is 42").code == 0
    assert asked[0] == asked[1]


def test_read_has_the_context_of_a_chat(
    run: Run, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models rotate by another table in a long context, and a document keeps to its own."""
    made, init = [], engine.Session.__init__

    def watched(self: engine.Session, *args: Any) -> None:
        init(self, *args)
        made.append(self.n_ctx)

    monkeypatch.setattr(engine.Session, "__init__", watched)
    out = tmp_path / "story.kv"
    assert run("read", text, "-m", tiny, "--plain", "-o", out).code == 0
    assert run("generate", "-m", tiny, "--document", out, "-p", "x", "-n", 1).code == 0
    assert len(made) == 2 and made[0] == made[1]


def test_several_documents(run: Run, tiny_chat: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"of {name} {TEXT}")
        ask = ("read", tmp_path / f"{name}.txt", "-m", tiny_chat, "-sys", "be brief")
        assert run(*ask).code == 0
    both = ("chat", "-m", tiny_chat, "-n", 4, "--document", "one", "--document", "two")
    script = f"who?\n/document\n/document two\nwho?\n/save {tmp_path}/talk.json\n"
    done = run(*both, stdin=script)
    assert done.code == 0, done.err
    assert done.err.count("one: ") == done.err.count("two: ") == 2, "opened, and in the list"
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == f"of two {TEXT}\n\nwho?"


def test_documents(run: Run, tiny_chat: Path, text: Path) -> None:
    nowhere = run("documents", "list", text.parent / "nowhere")
    assert (nowhere.code, nowhere.out) == (1, "") and "nowhere" in nowhere.err
    assert run("read", text, "-m", tiny_chat).code == 0
    again = run("read", text, "-m", tiny_chat)
    assert again.code == 2 and "--force" in again.err
    path = paths.documents() / "story.kv"
    (paths.documents() / "bad.kv").write_bytes(b"x" * 70_000)
    listed = run("documents")
    assert "story" in listed.out and tiny_chat.name in listed.out and "bad.kv" in listed.err
    told = json.loads(run("documents", "list", "--json").out)
    assert [d["name"] for d in told["documents"]] == ["story"]
    assert "q4" in run("documents", "show", "story").out
    assert told["documents"][0]["whole"] is True
    assert "whole" in run("documents", "verify", "story").out
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    checked = run("documents", "verify", "story")
    assert checked.code == 1 and "damaged" in checked.err and "hint:" in checked.err
    assert run("documents", "rm", "bad").code == 1, "nothing but documents is removed"
    kept = run("documents", "rm", "story")
    assert kept.code == 1 and "--yes" in kept.err and path.exists()
    assert "freed" in run("documents", "rm", "story", "--yes").out
    assert not path.exists()
    assert run("documents", "show", "story").code == 1


def test_a_document_for_something_else(run: Run, tiny: Path, tiny_chat: Path, text: Path) -> None:
    assert run("read", text, "-m", tiny_chat, "--plain").code == 0
    done = run("chat", "-m", tiny_chat, "--document", "story", stdin="hi\n")
    assert done.code == 1 and "chat" in done.err and "hint:" in done.err
    done = run("generate", "-m", tiny, "--document", "story", "-p", "x")
    assert done.code == 1 and tiny_chat.name in done.err
    assert run("read", text, "-m", tiny_chat, "--system", "a", "--force").code == 0
    done = run("chat", "-m", tiny_chat, "--document", "story", "--system", "b", stdin="hi\n")
    assert done.code == 2 and "--system" in done.err


def test_types_of_a_document(run: Run, tiny_chat: Path, text: Path, monkeypatch: Any) -> None:
    types = ("-ctk", "q8_0", "-ctv", "q4_0")
    assert run("read", text, "-m", tiny_chat, *types).code == 0
    assert run("chat", "-m", tiny_chat, "-n", 4, "--document", "story", stdin="hi\n").code == 0
    monkeypatch.setattr(native, "built", lambda **_: Path())  # serve asks for llama-server
    for verb in ("chat", "serve"):
        done = run(verb, tiny_chat, "--document", "story", "-ctk", "f16", stdin="hi\n")
        assert done.code == 1 and "K and V in q8_0/q4_0" in done.err


def test_a_document_may_be_larger_than_the_memory(
    run: Run, tiny_chat: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its K and V are pages of a file; those of a text that is read now are not."""
    assert run("read", text, "-m", tiny_chat).code == 0
    d = document_file.load(document_file.find("story"))
    weights, room = tiny_chat.stat().st_size, 4096 * 512  # K and V of its 4096 positions
    monkeypatch.setenv("SPARQ_MEMORY_LIMIT", str(weights + room - d.n_tokens * 512))
    ask = ("chat", "-m", tiny_chat, "-n", 2, "-c", 4096)
    assert "needs" in run(*ask, stdin="who?\n").err
    done = run(*ask, "--document", "story", stdin="who?\n")
    assert done.code == 0, done.err


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_read_is_kept(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Of a model with recurrent layers before its question is read, since their state is at the end
    of the text only then."""
    model = tiny_models.write(tmp_path / "m.gguf", arch, n_layer=4)
    ask = ("chat", "-m", model, "-n", 6, "--temp", 0, "-c", 4096, "--json", *SPARSE)
    script = f"/read {text}\nwho?\nand?\n"
    monkeypatch.setenv("SPARQ_DOCUMENTS_LIMIT", "0")
    assert run(*ask, stdin=script).code == 0 and not document_file.documents_in(paths.kept_texts())
    monkeypatch.delenv("SPARQ_DOCUMENTS_LIMIT")
    first, second = run(*ask, stdin=script), run(*ask, stdin=script)
    assert "read before" not in first.err and "read before" in second.err
    said, again = ([json.loads(x) for x in r.out.splitlines()] for r in (first, second))
    assert [r["reply"] for r in said] == [r["reply"] for r in again]
    assert again[0]["prefill_tokens"] < 40 < said[0]["prefill_tokens"]
    assert len(document_file.documents_in(paths.kept_texts())) == 1
    # K and V of 8-bit products are not those of an exact prompt
    part = [f"{w},prompt=f32" if str(w).startswith("sparq,") else w for w in ask]
    assert "read before" not in run(*part, stdin=script).err
    # another text, or one within a conversation, is another thing
    text.write_text(TEXT + "!")
    assert "read before" not in run(*ask, stdin=script).err
    assert "read before" not in run(*ask, stdin=f"hello\n{script}").err


def test_texts_before_a_message_follow_each_other(
    run: Run, tiny_chat: Path, text: Path, tmp_path: Path
) -> None:
    """The second `/read` took the place of the first, and of a document, without a word."""
    (other := tmp_path / "other.txt").write_text("and another")
    assert run("read", text, "-m", tiny_chat, "-o", tmp_path / "story.kv").code == 0
    ask, talk = ("chat", "-m", tiny_chat, "-n", 1, "-c", 4096), tmp_path / "talk.json"
    for begun, script in (((), f"/read {text}\n"), (("--document", tmp_path / "story.kv"), "")):
        done = run(*ask, *begun, stdin=f"{script}/read {other}\nwho?\n/save {talk}\n")
        assert done.code == 0 and "after what was read for it" in done.err, done.err
        said = json.loads(talk.read_text())["messages"][0]["content"]
        talk.unlink()
        assert said == f"{TEXT}\n\nand another\n\nwho?"
    assert len(document_file.documents_in(paths.kept_texts())) == 1  # the first, as ever
    script = f"/read {text}\n" * 3
    done = run(*ask, stdin=script)
    assert done.code == 1 and "hint:" in done.err


def test_a_saved_conversation_goes_on_at_once(run: Run, tiny_chat: Path, tmp_path: Path) -> None:
    ask = ("chat", "-m", tiny_chat, "-n", 6, "--temp", 0, "-c", 4096, "--json")
    file = tmp_path / "my talk.json"
    assert run(*ask, stdin=f"{TEXT}\n/save {file} kv\n").code == 0
    assert sorted(p.name for p in tmp_path.glob("my*")) == ["my talk.json", "my talk.json.kv"]
    with_kv = run(*ask, "--resume", file, stdin="and?\n")
    (beside := tmp_path / "my talk.json.kv").write_bytes(beside.read_bytes()[:-1])
    damaged = run(*ask, "--resume", file, stdin="and?\n")
    assert damaged.code == 0 and "the conversation is read again" in damaged.err
    a, b = json.loads(with_kv.out), json.loads(damaged.out)
    assert a["reply"] == b["reply"]
    assert a["prefill_tokens"] < 40 < len(TEXT) < b["prefill_tokens"]
