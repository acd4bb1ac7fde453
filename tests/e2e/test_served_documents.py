"""Documents beside llama-server, which renders conversations itself."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from server import ask, serving
from tiny import TURNS, write_tiny_gguf

from pyorch import engine
from pyorch.cli import served_documents
from pyorch.engine import Document
from pyorch.engine.chat_template import ChatTemplate
from pyorch.models.gguf_file import read_gguf

# in two of the ways in which templates ask
DATED = (
    '{% if strftime_now is defined %}{% set day = strftime_now( "%d %b \'%y" ) %}{% endif %}'
    "{{ '<s>it is ' + day + strftime_now(' at %H:%M') + '</s>\n' }}" + TURNS
)
TEXT = "the text that was read once, " * 40
THEN = dt.datetime(2025, 1, 2, 3, 4)
COMMON = ("-t", 1, "-c", 4096, "-np", 1, "-fa", "on", "--sparse-attn", "sparq")


# Llama 3.1 states a day of its own where nobody gives it one, and 3.2 asks; llama-server gives it
STRING = "{% if date_string is not defined %}{% set date_string = DAY %}{% endif %}" + (
    "{{ '<s>it is ' + date_string + '</s>\n' }}" + TURNS
)
TEMPLATES = {
    "asked": DATED,
    "by-name": DATED.replace("now( ", "now(format=").replace("now(' at", "now(format=' at"),
    "3.1": STRING.replace("DAY", "'26 Jul 2024'"),
    "3.2": STRING.replace("DAY", "strftime_now('%d %b %Y')"),
}


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "dated.gguf", chat_template=DATED)


def read(model: Path, path: Path, text: str = TEXT) -> Document:
    """A document that was read long ago."""
    with engine.load(model, n_threads=1, attention="sparq") as s:
        template = ChatTemplate(s, now=THEN)
        return engine.read_document(s, path, engine.Reading("story", text), template)


def usable(document: Document, url: str, key: str = "", *more: str) -> int:
    where = urlsplit(url)
    return served_documents.n_usable([document], where.hostname or "", where.port or 0, key, more)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_begins_with_a_document_of_another_day(
    server_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model = write_tiny_gguf(tmp_path / "dated.gguf", chat_template=TEMPLATES[name])
    document, file = read(model, tmp_path / "d.kv"), read_gguf(model)
    options, _ = served_documents.passed_on(file, [document], (), tmp_path)
    assert ("2025-01-02 03:04" in capsys.readouterr().err) == (name != "3.1")
    with serving(server_dir, tmp_path / "log", "-m", model, *COMMON, *options) as url:
        assert usable(document, url) == document.n_tokens
        assert not capsys.readouterr().err
        assert usable(document, url, "", "--lora", "x") == 0
        assert "--lora" in capsys.readouterr().err
        own = {"messages": [], "chat_template_kwargs": {"date_string": "9 Sep 1999"}}
        prompt = ask(f"{url}/apply-template", own)["prompt"]
        assert ("9 Sep 1999" in prompt) == name.startswith("3."), "a client's own date"


def test_a_prompt_that_does_not_begin_with_it(
    server_dir: Path, dated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = read(dated, tmp_path / "d.kv")
    (keys := tmp_path / "keys").write_text("secret\n")
    line = ("-m", dated, *COMMON, "--api-key-file", keys)
    with serving(server_dir, tmp_path / "log", *line) as url:
        assert usable(document, url, "secret") == 0
        assert "02 Jan" in capsys.readouterr().err
        assert usable(document, url) == document.n_tokens, "nobody knows"
        assert "401" in capsys.readouterr().err


def test_a_text_that_spells_control_tokens(
    server_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama-server reads the tokens, so it is told that the document is of no use from there on."""
    model = write_tiny_gguf(tmp_path / "turns.gguf", chat_template=TURNS)
    spelled = read(model, tmp_path / "s.kv", f"It ends with </s>. {TEXT}")
    plain = read(model, tmp_path / "p.kv")
    with serving(server_dir, tmp_path / "log", "-m", model, *COMMON) as url:
        assert usable(plain, url) == plain.n_tokens and not capsys.readouterr().err
        assert usable(spelled, url) == 0
    assert "</s>" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [("--chat-template-file", "x"), ("--chat_template=x",), ("--no-jinja",)]
)
def test_a_template_of_the_user_is_left_alone(dated: Path, tmp_path: Path, more: Any) -> None:
    document, file = read(dated, tmp_path / "d.kv"), read_gguf(dated)
    options, _ = served_documents.passed_on(file, [document], more, tmp_path)
    assert "--chat-template-file" not in options
