"""llama-server with images: the text of such a prompt has sparse attention and documents as ever.

What an image puts into the cache comes as embeddings. With the projector of Gemma 3 its tokens see
each other, whatever their order; with M-RoPE they share a position. Neither may confuse the
transposed K: with all components in f16 SparQ chooses the positions that top-k chooses, which reads
K itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny as models
import tiny_vision
from server import ask, serving
from test_documents import SPARSE, reading

from pyorch import engine
from pyorch.engine import document_file

COMMON = ("-t", 1, "-c", 4096, "-np", 2, "-fa", "on", "--no-kv-unified", "--cache-ram", 0)
TOPK = "topk,k=48,min_ctx=0"
SPARQ = "sparq,k=48,min_ctx=0,rank=32,shadow=f16,mean_v=off"
KINDS = [("llama", "mlp"), ("llama", "gemma3"), ("qwen2vl", "mlp")]
# two images and the text around them; neither begins or ends where a group of positions does
STORY = reading(700, seed=3).text
LETTERS = [reading(n, seed=n).text for n in (201, 333, 150)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[object, ...]]:
    """The options that name a model and its projector."""
    folder = tmp_path_factory.mktemp("vision")

    def of(arch: str, projector: str) -> tuple[object, ...]:
        model, mmproj = folder / f"{arch}.gguf", folder / f"{projector}.mmproj"
        if not model.exists():
            models.write(model, arch)
        return "-m", model, "--mmproj", tiny_vision.write(mmproj, projector), "--no-mmproj-offload"

    return of


def complete(url: str, prompt: str, *images: str, **more: Any) -> dict[str, Any]:
    """The reply to a prompt in which each `|` stands for an image."""
    asked: dict[str, Any] = {"prompt": prompt}
    if images:
        marker = ask(f"{url}/props")["media_marker"]
        text = prompt.replace("|", marker)
        asked["prompt"] = {"prompt_string": text, "multimodal_data": list(images)}
    return ask(f"{url}/completion", {**asked, "n_predict": 40, "temperature": 0, **more})


def replies(url: str, **more: Any) -> list[dict[str, Any]]:
    """To a prompt without images, to one with two, and to one with the same the other way round."""
    one, two, story = tiny_vision.image(1), tiny_vision.image(2), "|".join(LETTERS)
    asked = (STORY,), (story, one, two), (story, two, one)
    return [complete(url, *a, id_slot=0, cache_prompt=False, **more) for a in asked]


@pytest.mark.parametrize(("arch", "projector"), KINDS)
def test_the_text_around_images_is_sparse(
    server_dir: Path, files: Any, tmp_path: Path, arch: str, projector: str
) -> None:
    line = (*files(arch, projector), *COMMON)
    n_prompt = 1 + 2 * tiny_vision.N_TOKENS[projector] + sum(map(len, LETTERS))
    said = {}
    for spec in ("off", TOPK, SPARQ):
        with serving(server_dir, tmp_path / "log", *line, "--sparse-attn", spec) as url:
            found = replies(url)
            said[spec] = [reply["content"] for reply in found]
            assert [r["timings"]["prompt_n"] for r in found[1:]] == [n_prompt, n_prompt]
            if spec == "off":
                continue
            assert all(r["timings"]["sparse_attn"]["calls_sparse"] > 0 for r in found)
            off = [reply["content"] for reply in replies(url, sparse_attn="off")]
            assert off == said["off"]
    assert said[SPARQ] == said[TOPK] != said["off"]
    assert said["off"][1] != said["off"][2], "the images are seen"


def test_documents_beside_images(
    server_dir: Path, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that begins with one, and goes on with an image or not, is not read again."""
    line = (*files("llama", "mlp"), *COMMON, "--sparse-attn", SPARSE)
    with engine.load(line[1], attention=SPARSE, n_ctx=2048) as s:
        book = engine.read_document(s, tmp_path / "book.kv", reading(1100))
    text, picture = document_file.content(book)[1], tiny_vision.image()

    def answers(url: str) -> list[dict[str, Any]]:
        asked = (text + " who?",), (text + " | who?", picture), ("| " + text, picture)
        return [complete(url, *a, id_slot=1) for a in asked]

    with serving(server_dir, tmp_path / "log", *line) as url:
        wanted = [reply["content"] for reply in answers(url)]
    (tmp_path / "list").write_text(document_file.listed([book]))
    monkeypatch.setenv("SPARQ_DOCUMENTS", str(tmp_path / "list"))
    with serving(server_dir, log := tmp_path / "log2", *line, "-lv", 4) as url:
        found = answers(url)
    assert [reply["content"] for reply in found] == wanted
    n_read = [reply["timings"]["prompt_n"] for reply in found]
    assert n_read[0] == 5 and n_read[1] < 100 and n_read[2] > 1100
    assert log.read_text().count("were read before") == 1
