"""llama-server with documents: a prompt that begins with one is not read again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from server import ask, serving, text
from test_documents import SPARSE, reading

from pyorch import engine, native
from pyorch.engine import document_file

COMMON = ("-t", 1, "-c", 4096, "-np", 2, "-fa", "on", "--no-kv-unified", "--sparse-attn", SPARSE)
MAPPED = ("-c", 96 * 2048, "-np", 96)  # a cache that is large enough for pages of a file


@pytest.fixture(scope="module")
def tools() -> Path:
    return native.built(tools=("llama-server",))


@pytest.fixture(scope="module")
def books(tiny: Path, tmp_path_factory: Any) -> list[document_file.Document]:
    folder = tmp_path_factory.mktemp("documents")
    with engine.load(tiny, attention=SPARSE, n_ctx=2048) as s:
        return [
            engine.read_document(s, folder / f"{i}.kv", reading(1100 + 200 * i, seed=i))
            for i in range(2)
        ]


def complete(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "n_predict": 20, "temperature": 0, "ignore_eos": True}
    return ask(f"{url}/completion", {**asked, **more})


@pytest.mark.parametrize("limit", [0, 200_000])
def test_documents_are_not_read_again(
    tools: Path,
    tiny: Path,
    books: list[document_file.Document],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
) -> None:
    texts = [document_file.content(d)[1] for d in books]
    prompts = [
        texts[0] + " who?",
        texts[1] + " where?",
        texts[0] + " why?",
        "short",
        texts[1][:600],
    ]
    args = ("-m", tiny, *COMMON)
    with serving(tools, tmp_path / "log", *args) as url:
        wanted = [complete(url, p, cache_prompt=False)["content"] for p in prompts]
    (tmp_path / "list").write_text(document_file.listed(books))
    monkeypatch.setenv("SPARQ_DOCUMENTS", str(tmp_path / "list"))
    args = (*args, "--cache-ram", 0, "-lv", 4, "--metrics")
    if limit:
        args = (*args, *MAPPED)
        monkeypatch.setenv("SPARQ_KV_MEMORY", str(limit))
    with serving(tools, log := tmp_path / "log2", *args) as url:
        for again in range(2):
            found = [complete(url, p, id_slot=again) for p in prompts]
            assert [f["content"] for f in found] == wanted
            new = [f["timings"]["prompt_n"] for f in found]
            # a question is all that is read; of a shorter beginning the last token, which has none
            assert new[:3] == [5, 7, 5] and new[4] == 1, new
            assert all(f["timings"]["sparse_attn"]["calls_sparse"] > 0 for f in found[:3])
        found = dict(re.findall(r"^sparq:(document_\w+) (\d+)$", text(f"{url}/metrics"), re.M))
        assert (int(found["document_bytes_read_total"]) > 0) == (limit > 0)
    assert log.read_text().count("were read before") == 8


def test_a_document_that_went_bad_is_read(
    tools: Path,
    tiny: Path,
    books: list[document_file.Document],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reply is the same; the log says why it took longer."""
    prompt = document_file.content(books[0])[1] + " who?"
    (bad := tmp_path / "bad.kv").write_bytes(books[0].path.read_bytes()[:-70_000])
    lines = document_file.listed(books[:1]).replace(str(books[0].path), str(bad))
    (tmp_path / "list").write_text(f"/nowhere.kv\n3 65536 65536\nx\n{lines}")
    args = ("-m", tiny, *COMMON)
    with serving(tools, tmp_path / "log", *args) as url:
        wanted = complete(url, prompt)["content"]
    monkeypatch.setenv("SPARQ_DOCUMENTS", str(tmp_path / "list"))
    with serving(tools, log := tmp_path / "log2", *args) as url:
        found = complete(url, prompt)
        assert found["content"] == wanted and found["timings"]["prompt_n"] > 1000
        assert complete(url, prompt)["content"] == wanted
    said = log.read_text()
    assert "/nowhere.kv cannot be read" in said
    assert "bad.kv: the document is shorter than its header says" in said
