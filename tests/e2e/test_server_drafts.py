"""llama-server with drafts: the greedy text is the one without, token by token.

The weights are Q8_0, whose products have the same bits for several tokens as for one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny as tiny_models
from server import complete, serving, text
from tiny import text_of

SPARSE = "sparq,rank=8,topk=64,min_ctx=0"
COMMON = ("-t", 1, "-c", 4096, "-fa", "on", "--cache-ram", 0)
N_PROMPT, N_REPLY = 700, 300
MODES = {"one": ("-np", 1), "unified": ("-np", 2, "--kv-unified"), "split": ("-np", 2, "-no-kvu")}
MODES["ubatches"] = ("-np", 1, "-ub", 32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, sizes = tmp_path_factory.mktemp("m"), {"n_layer": 2, "weights": "Q8_0"}
    archs = {"target": "llama", "other": "llama", "mtp": "glm4moe"}
    return {
        name: tiny_models.write(folder / f"{name}.gguf", arch, seed=seed, **sizes)
        for seed, (name, arch) in enumerate(archs.items(), 3)
    }


NGRAMS = {  # of few tokens, since a random model hardly repeats itself
    "ngram-simple": ("--spec-ngram-simple-size-n", 2, "--spec-ngram-simple-size-m", 6),
    "ngram-mod": ("--spec-ngram-mod-n-match", 2, "--spec-ngram-mod-n-min", 1),
}
LETTERS = {"grammar": "root ::= [a-d]+"}


def drafts(kind: str, models: dict[str, Path]) -> tuple[object, ...]:
    if kind in NGRAMS:
        return "--spec-type", kind, *NGRAMS[kind]
    if kind == "mtp":
        return "--spec-type", "draft-mtp", "--spec-draft-n-max", 3
    model = models["target" if kind == "itself" else "other"]
    return "--spec-type", "draft-simple", "--spec-draft-model", model, "--spec-draft-n-max", 6


def drafted(url: str, **more: Any) -> dict[str, Any]:
    return complete(url, text_of(N_PROMPT), n_predict=N_REPLY, cache_prompt=False, **more)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["itself", "another", "mtp", *NGRAMS])
def test_the_text_is_that_without_drafts(
    server_dir: Path, models: dict[str, Path], tmp_path: Path, kind: str, mode: str
) -> None:
    """Drafts of the same model, which reads exactly, of another, of an MTP head, of n-grams."""
    args = ("-m", models.get(kind, models["target"]), *COMMON, *MODES[mode], "--metrics")
    args += ("--sparse-attn", SPARSE)
    more = LETTERS if kind in NGRAMS else {}
    with serving(server_dir, tmp_path / "log", *args) as url:
        want = drafted(url, **more)
    assert want["timings"]["sparse_attn"]["verified"] == 0
    with serving(server_dir, tmp_path / "log2", *args, *drafts(kind, models)) as url:
        found = [drafted(url, **more) for _ in range(2)]
        metrics = text(f"{url}/metrics")
        exact = drafted(url, **more, sparse_attn=SPARSE + ",verify=exact")
    verified = 0
    for answer in found:
        said = answer["timings"]
        own = said["sparse_attn"]
        assert answer["content"] == want["content"]
        assert said["draft_n"] > said["draft_n_accepted"]
        assert said["draft_n_accepted"] > 20 or kind in ("another", "mtp")
        assert own["verified"] > said["draft_n"] > 50, "each with the token before it"
        assert own["steps"] == N_REPLY - 1 + said["draft_n"] - said["draft_n_accepted"]
        assert own["calls_sparse"] == 2 * own["steps"]
        verified += own["verified"]
    assert f"\nsparq:verified_tokens_total {verified}\n" in metrics
    assert exact["timings"]["draft_n"] > 0
    assert exact["timings"]["sparse_attn"]["verified"] == 0
