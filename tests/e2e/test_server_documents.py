"""llama-server with documents: a prompt that begins with one is not read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny as tiny_models
from server import ask, complete, serving, text
from test_documents import SPARSE, reading
from tiny import finish

from pyorch import engine
from pyorch.engine import document_file

COMMON = ("-t", 1, "-c", 4096, "-np", 2, "-fa", "on", "--no-kv-unified", "--sparse-attn", SPARSE)
MAPPED = ("-c", 96 * 2048, "-np", 96)  # a cache that is large enough for pages of a file


@pytest.fixture(scope="module")
def books(tiny: Path, tmp_path_factory: Any) -> list[document_file.Document]:
    folder = tmp_path_factory.mktemp("documents")
    with engine.load(tiny, attention=SPARSE, n_ctx=2048) as s:
        return [
            engine.read_document(s, folder / f"{i}.kv", reading(1100 + 200 * i, seed=i))
            for i in range(2)
        ]


@pytest.fixture
def told(
    books: list[document_file.Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Servers that are started after `told()` know the books, or what a list in place of theirs
    says."""

    def tell(lines: str = "") -> None:
        (tmp_path / "list").write_text(lines or document_file.listed(books))
        monkeypatch.setenv("SPARQ_DOCUMENTS", str(tmp_path / "list"))

    return tell


@pytest.mark.parametrize("more", [(), MAPPED], ids=["copied", "mapped"])
def test_documents_are_not_read_again(
    server_dir: Path, tiny: Path, books: Any, tmp_path: Path, told: Any, more: tuple[object, ...]
) -> None:
    texts = [document_file.content(d)[1] for d in books]
    prompts = [texts[0] + " who?", texts[1] + " where?", texts[0] + " why?", "short"]
    prompts.append(texts[1][:600])
    args = ("-m", tiny, *COMMON)
    with serving(server_dir, tmp_path / "log", *args) as url:
        wanted = [complete(url, p, cache_prompt=False)["content"] for p in prompts]
    told()
    args = (*args, "--cache-ram", 0, "-lv", 4, *more)
    with serving(server_dir, log := tmp_path / "log2", *args) as url:
        for again in range(2):
            found = [complete(url, p, id_slot=again) for p in prompts]
            assert [f["content"] for f in found] == wanted
            new = [f["timings"]["prompt_n"] for f in found]
            # a question is all that is read; of a shorter beginning the last token, which has none
            assert new[:3] == [5, 7, 5] and new[4] == 1, new
            assert all(f["timings"]["sparse_attn"]["calls_sparse"] > 0 for f in found[:3])
    assert log.read_text().count("were read before") == 8


@pytest.mark.parametrize("arch", ["gemma3", "lfm2"])
def test_documents_of_other_models(
    server_dir: Path, tmp_path: Path, told: Callable[..., None], arch: str
) -> None:
    """Windows and recurrent layers have its end, so a prompt that leaves it reads all of it."""
    path = tiny_models.write(tmp_path / "m.gguf", arch, n_layer=6)
    with engine.load(path, attention=SPARSE, n_ctx=2048) as s:
        book = engine.read_document(s, tmp_path / "book.kv", reading(1800))
    whole = document_file.content(book)[1]
    prompts = [whole + " who?", whole + " where?", "short", whole + " why?", whole[:600] + " so?"]
    args = ("-m", path, *COMMON, "--cache-ram", 0, "-lv", 4)
    with serving(server_dir, tmp_path / "log", *args) as url:
        wanted = [complete(url, p, cache_prompt=False)["content"] for p in prompts]
    told(document_file.listed([book]))
    with serving(server_dir, log := tmp_path / "log2", *args) as url:
        for slot in range(2):
            found = [complete(url, p, id_slot=slot) for p in prompts]
            assert [f["content"] for f in found] == wanted
            new = [f["timings"]["prompt_n"] for f in found]
            # a second question goes back to where it leaves the first, or opens the document again
            assert new[0] == new[3] == 5 and new[1] == (4 if arch == "gemma3" else 7)
            assert new[4] > 600, new
    assert "windows and recurrent layers need one after all of them" in log.read_text()


@pytest.mark.parametrize("arch", ["gemma3", "lfm2"])
def test_a_restored_slot_reads_nothing_again(server_dir: Path, tmp_path: Path, arch: str) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", arch, n_layer=6)
    args = ("-m", path, *COMMON, "--cache-ram", 0, "--slot-save-path", tmp_path)
    asked, more = reading(1500).text, {"return_tokens": True}
    with serving(server_dir, tmp_path / "log", *args) as url:
        first = complete(url, asked, id_slot=0, **more)
        ask(f"{url}/slots/0?action=save", {"filename": "kept"})
        goes_on = [*ask(f"{url}/tokenize", {"content": asked, "add_special": True})["tokens"]]
        goes_on += [*first["tokens"], 100, 101, 102]
        wanted = complete(url, goes_on, id_slot=0)
        assert wanted["timings"]["prompt_n"] <= 4
    with serving(server_dir, tmp_path / "log2", *args) as url:
        ask(f"{url}/slots/1?action=restore", {"filename": "kept"})
        found = complete(url, goes_on, id_slot=1)
        assert found["content"] == wanted["content"]
        assert found["timings"]["prompt_n"] == wanted["timings"]["prompt_n"]


def test_a_document_that_went_bad_is_read(
    server_dir: Path, tiny: Path, books: Any, tmp_path: Path, told: Any
) -> None:
    """The reply is the same; the log says why it took longer."""
    prompt = document_file.content(books[0])[1] + " who?"
    (bad := tmp_path / "bad.kv").write_bytes(books[0].path.read_bytes()[:-70_000])
    lines = document_file.listed(books[:1]).replace(str(books[0].path), str(bad))
    args = ("-m", tiny, *COMMON)
    with serving(server_dir, tmp_path / "log", *args) as url:
        wanted = complete(url, prompt)["content"]
    told(f"/nowhere.kv\n3 65536 65536\nx\n{lines}")
    with serving(server_dir, log := tmp_path / "log2", *args) as url:
        found = complete(url, prompt)
        assert found["content"] == wanted and found["timings"]["prompt_n"] > 1000
        assert complete(url, prompt)["content"] == wanted
    said = log.read_text()
    assert "/nowhere.kv" in said and "bad.kv" in said


def test_a_document_that_is_replaced_stays_in_use(
    server_dir: Path, tiny: Path, tmp_path: Path, told: Any
) -> None:
    """Its tokens are known since the start, and the file of now is of another text."""
    with engine.load(tiny, attention=SPARSE, n_ctx=2048) as s:
        path = tmp_path / "book.kv"
        book = engine.read_document(s, path, reading(1100))
        other = engine.read_document(s, tmp_path / "other.kv", reading(1100, seed=2))
    prompt = document_file.content(book)[1] + " who?"
    args = ("-m", tiny, *COMMON, "--cache-ram", 0)
    with serving(server_dir, tmp_path / "log", *args) as url:
        wanted = complete(url, prompt, n_probs=1)
    told(document_file.listed([book]))
    with serving(server_dir, tmp_path / "log2", *args) as url:
        other.path.replace(path)
        found = complete(url, prompt, n_probs=1)
    assert found["timings"]["prompt_n"] == 5 and found["content"] == wanted["content"]
    likely = [[p["logprob"] for p in x["completion_probabilities"]] for x in (wanted, found)]
    assert np.allclose(*likely, rtol=0, atol=1e-5)


# ---- beside what changes K and V ----


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the tiny model."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("lora") / "lora.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_string("general.type", "adapter")
    w.add_string("adapter.type", "lora")
    w.add_float32("adapter.lora.alpha", 8.0)
    for layer in range(2):
        for name in ("attn_k", "attn_v"):
            for half, shape in (("a", (8, 128)), ("b", (64, 8))):
                values = (0.3 * rng.standard_normal(shape)).astype(np.float32)
                w.add_tensor(f"blk.{layer}.{name}.weight.lora_{half}", values)
    finish(w)
    return path


@pytest.fixture(scope="module")
def vector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control vector for the tiny model."""
    path = tmp_path_factory.mktemp("vector") / "vector.gguf"
    w = gguf.GGUFWriter(path, "controlvector")
    w.add_tensor("direction.1", np.random.default_rng(0).standard_normal(128).astype(np.float32))
    finish(w)
    return path


OFF = {"lora": [{"id": 0, "scale": 0.0}]}
EPSILON = "llama.attention.layer_norm_rms_epsilon=float:0.5"
ROPE = "llama.rope.scaling.original_context_length=int:77"
# the options of the server (of which a fixture is a file), the fields of the request, and what the
# log names where the document is not used; "": it is
BESIDE: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing": ("", {}, ""),
    "lora": ("--lora lora", {}, "LoRA"),
    "lora that is off": ("--lora lora", OFF, ""),
    "control vector": ("--control-vector vector", {}, "control vector"),
    "metadata": (f"--override-kv {EPSILON}", {}, "--override-kv"),
    "tokenizer": ("--override-kv tokenizer.ggml.add_eos_token=bool:false", {}, ""),
    "original context": (f"--override-kv {ROPE}", {}, "rotations"),
    "base of the rotations": ("--rope-freq-base 500", {}, "rotations"),
    "type of K": ("--cache-type-k q8_0", {}, "cache types"),
    "no cache": ("", {"cache_prompt": False}, "the request asks"),
    "a draft model": ("--spec-type draft-simple --spec-draft-model tiny", {}, "draft model"),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_what_changes_k_and_v(
    server_dir: Path,
    tiny: Path,
    books: Any,
    tmp_path: Path,
    told: Any,
    beside: str,
    request: pytest.FixtureRequest,
) -> None:
    """The reply is that of a server without documents, and the log says why one is not used."""
    options, fields, why = BESIDE[beside]
    files = ("lora", "vector", "tiny")
    line = [request.getfixturevalue(x) if x in files else x for x in options.split()]
    prompt = document_file.content(books[0])[1] + " who?"
    args = ("-m", tiny, *COMMON, *line)
    with serving(server_dir, tmp_path / "log", *args) as url:
        wanted = complete(url, prompt, **fields)
    told()
    with serving(server_dir, log := tmp_path / "log2", *args, "-lv", 4) as url:
        found = complete(url, prompt, **fields)
    assert found["content"] == wanted["content"]
    assert (found["timings"]["prompt_n"] < 10) == (not why)
    said = [line for line in log.read_text().splitlines() if "sparse document: " in line]
    assert said and all(why in x and ("document: unused " in x) == bool(why) for x in said)


def test_a_model_that_only_embeds(server_dir: Path, tmp_path: Path, told: Any) -> None:
    """It has no cache that could go back from what its slot held, or go on with it."""
    model = tiny_models.write(tmp_path / "m.gguf", "gemma-embedding", n_layer=6)
    told()
    line = ("-m", model, "-t", 1, "-np", 1, "-c", 512, "--embeddings", "--pooling", "mean")
    with serving(server_dir, tmp_path / "log", *line) as url:
        for first, n in ((100, 4), (100, 9), (110, 20)):
            found = ask(f"{url}/v1/embeddings", {"input": [*range(first, first + n)]})
            assert len(found["data"][0]["embedding"]) == 128


def test_adapters_that_change_while_it_runs(
    server_dir: Path, tiny: Path, books: Any, tmp_path: Path, told: Any, lora: Path
) -> None:
    """What a slot holds was made with the adapters of that time, a document with none."""
    prompt = document_file.content(books[0])[1] + " who?"
    args = ("-m", tiny, *COMMON, "--cache-ram", 0, "--lora", lora)
    with serving(server_dir, tmp_path / "log", *args) as url:
        wanted = {1.0: complete(url, prompt)["content"]}
        wanted[0.0] = complete(url, prompt, **OFF)["content"]
    told()
    with serving(server_dir, tmp_path / "log2", *args) as url:
        for scale, is_read in ((0.0, False), (1.0, True), (0.0, False)):
            text(f"{url}/lora-adapters", [{"id": 0, "scale": scale}])
            found = complete(url, prompt, id_slot=0)
            assert found["content"] == wanted[scale]
            assert (found["timings"]["prompt_n"] > 1000) == is_read
