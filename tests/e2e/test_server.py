"""llama-server with a setting for each request: replies, what they read, and what is refused."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from server import ask, events, metrics, sent, serving, text
from tiny import CHATML, make, save, text_of

N_LAYER, N_HEAD_KV, N_SLOT = 2, 2, 4  # layers and KV heads of the model `tiny`
# codes and blocks of few bits share a scale with other sequences
SERVERS = "sparq,rank=8,topk=64,min_ctx=0,shadow=f16,prompt=f32"
SPECS = [None, "sparq,rank=4,topk=90", "dense", "off"]
ASKED = {"n_predict": 24, "temperature": 0, "ignore_eos": True, "cache_prompt": False}


@pytest.fixture(scope="module", params=["unified", "split"])
def url(
    request: pytest.FixtureRequest, server_dir: Path, tiny: Path, tmp_path_factory: Any
) -> Iterator[str]:
    mode = "--kv-unified" if request.param == "unified" else "--no-kv-unified"
    log = tmp_path_factory.mktemp("server") / "log"
    line = ("-m", tiny, "-t", 1, "-np", N_SLOT, "-c", 4096, "-b", 64, "-ub", 64, mode, "--metrics")
    with serving(server_dir, log, *line, "--slots", "--sparse-attn", SERVERS) as address:
        yield address


def complete(url: str, seed: int, spec: str | None, **more: Any) -> dict[str, Any]:
    chosen = {} if spec is None else {"sparse_attn": spec}
    return ask(f"{url}/completion", {"prompt": text_of(300, seed), **ASKED, **chosen, **more})


def positions_read(answer: dict[str, Any]) -> float:
    """By a KV head for a token, in the mean."""
    read = answer["timings"]["sparse_attn"]
    return read["positions_read"] / read["steps"] / N_LAYER / N_HEAD_KV


def test_requests_with_unlike_settings_at_once(url: str) -> None:
    """Each reply is what it is alone, and reads what its settings say."""
    cases = list(enumerate(SPECS))
    alone = [complete(url, seed, spec) for seed, spec in cases]
    with ThreadPoolExecutor(N_SLOT) as pool:
        together = list(pool.map(lambda case: complete(url, *case), cases))
    for a, b in zip(alone, together, strict=True):
        assert a["content"] == b["content"] and len(a["content"]) > 10
    assert len({a["content"] for a in alone}) == len(SPECS)
    for answer, spec in zip(together, SPECS, strict=True):
        read = answer["timings"]["sparse_attn"]
        said = read["spec"].partition(",")[0]
        assert read["steps"] == ASKED["n_predict"] - 1
        assert answer["generation_settings"]["sparse_attn"] == (spec or SERVERS)
        if spec in ("dense", "off"):
            assert said == spec and read["calls_sparse"] == 0
            assert read["positions_read"] == read["positions_visible"]
        else:
            assert said == "sparq" and read["calls_sparse"] == read["steps"] * N_LAYER
    assert positions_read(together[0]) == 64 and positions_read(together[1]) == 90
    assert positions_read(together[2]) > 290
    assert alone[3]["timings"]["sparse_attn"]["calls_dense"] == 0, "alone, off is llama.cpp's own"


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_of_anthropics_api(url: str, stream: bool) -> None:
    said = [{"role": "user", "content": text_of(300)}]
    body = {"messages": said, "max_tokens": 24, "stream": stream, "sparse_attn": SPECS[1]}
    lines = text(f"{url}/v1/messages", body).splitlines()
    (reply,) = (json.loads(line.removeprefix("data: ")) for line in lines if '"timings"' in line)
    assert positions_read(reply) == 90


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_what_stands_before_a_change_is_not_read_again(
    server_dir: Path, tmp_path: Path, arch: str
) -> None:
    """As agents ask: a conversation goes on, another comes between, the last message is changed.
    Layers with windows and recurrent ones go back to a checkpoint."""
    model = save(make(arch, n_layer=6), tmp_path / "m.gguf", chat_template=CHATML)
    line, n_read = ("-m", model, "-t", 1, "-np", 1, "--sparse-attn", SERVERS), []
    goes_on = [text_of(1500), "so", "a"]
    talks = goes_on[:1], goes_on, [text_of(100, 2)], [*goes_on, "no", "b"], [*goes_on, "no", "c"]
    with serving(server_dir, tmp_path / "log", *line) as url:
        for talk in talks:
            roles = ("user", "assistant") * 3
            said = [{"role": r, "content": text} for r, text in zip(roles, talk, strict=False)]
            answer = ask(f"{url}/v1/chat/completions", {"messages": said, "max_tokens": 4})
            n_read.append(answer["timings"]["prompt_n"])
    assert n_read[0] > 1500 and max(n_read[1:]) < 130, n_read


def test_several_replies_to_one_prompt(url: str) -> None:
    """Greedy ones are alike; those after the first begin with a copy of its prompt."""
    body = {"prompt": text_of(300), **ASKED, "n": 2, "max_tokens": ASKED["n_predict"]}
    alone, before = complete(url, 0, None, prompt=text_of(300))["content"], decoded(url)
    answer = ask(f"{url}/v1/completions", body)
    assert [c["text"] for c in answer["choices"]] == [alone] * 2
    assert decoded(url) - before == 2 * (ASKED["n_predict"] - 1)


def decoded(url: str) -> float:
    return metrics(url).get("sparq:decoded_tokens_total", 0)


@pytest.fixture(scope="module")
def keeper(server_dir: Path, tiny: Path, tmp_path_factory: Any) -> Iterator[str]:
    """A server that saves slots, keeps prompts in memory, shifts contexts and reuses pieces."""
    folder = tmp_path_factory.mktemp("keeper")
    line = ("-m", tiny, "-t", 1, "-tb", 4, "-np", 2, "-c", 1024, "--no-kv-unified", "-b", 64)
    line += ("-ub", 64)
    line += ("--slot-save-path", folder, "--cache-ram", 64, "--context-shift", "--metrics")
    with serving(server_dir, folder / "log", *line, "--sparse-attn", SERVERS) as address:
        yield address


def fresh(url: str, prompt: str, **more: Any) -> str:
    return complete(url, 0, None, prompt=prompt, **more)["content"]


def kept(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    return complete(url, 0, None, prompt=prompt, cache_prompt=True, **more)


def test_a_restored_slot_replies_as_a_fresh_one(keeper: str) -> None:
    """Its last token is one of a prompt, although it comes alone; what follows is sparse."""
    first, other = text_of(300, 7), text_of(300, 8)
    longer = first + text_of(30, 9)
    want = [fresh(keeper, prompt, id_slot=0) for prompt in (first, longer)]
    kept(keeper, first, id_slot=0, n_predict=0)
    for action in ("save", "erase"):
        ask(f"{keeper}/slots/0?action={action}", {"filename": "kept"})
    kept(keeper, other, id_slot=0)
    for prompt, content in zip((first, longer), want, strict=True):
        assert ask(f"{keeper}/slots/0?action=restore", {"filename": "kept"})["n_restored"] > 299
        answer = kept(keeper, prompt, id_slot=0)
        assert answer["content"] == content
        assert answer["timings"]["cache_n"] > 290, "it was restored"
        read = answer["timings"]["sparse_attn"]
        assert read["steps"] == ASKED["n_predict"] - 1 and positions_read(answer) == 64


def test_a_prompt_from_memory_replies_as_a_fresh_one(keeper: str) -> None:
    """Of requests that displaced each other from the slots."""
    texts = [text_of(300, seed) for seed in range(20, 24)]
    want = [fresh(keeper, prompt) for prompt in texts]
    for _ in range(2):
        answers = [kept(keeper, prompt) for prompt in texts]
        assert [a["content"] for a in answers] == want
    assert all(a["timings"]["cache_n"] > 290 for a in answers)


def test_a_shifted_context_beside_another_slot(keeper: str) -> None:
    """A reply that outgrows its slot, alone and beside requests that are cancelled meanwhile."""
    prompt, long = text_of(400, 11), {"n_predict": 200, "id_slot": 0}
    want = fresh(keeper, prompt, **long)

    def cancelled(i: int) -> None:
        body = {"prompt": text_of(350, 30 + i), **ASKED, "id_slot": 1, "n_predict": 100}
        with closing(sent(keeper, body)) as connection:
            next(events(connection))

    with ThreadPoolExecutor(2) as pool:
        reply = pool.submit(fresh, keeper, prompt, **long)
        list(pool.map(cancelled, range(5)))
        assert reply.result() == want
    assert len(want) > 100


REFUSED = {  # what the library refuses: test_sequences.py
    "method": ("spark", "spark"),
    "rank": ("sparq,rank=5000", "rank"),
    "zero": ("dense\0x", "character 0"),
    "number": (7, "string"),
    "object": ({"ratio": 0.1}, "string"),
    "long": ("\ud83d\ude00" * 3000, "method"),
    "bytes": ("sparq,k_layers=" + "1:" * 10000, "16384 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(url: str, case: str, stream: bool) -> None:
    """With 400 and the reason in one line; the next request is served."""
    spec, name = REFUSED[case]
    with pytest.raises(urllib.error.HTTPError) as error:
        complete(url, 1, spec, stream=stream)
    said = json.load(error.value)["error"]
    assert error.value.code == said["code"] == 400
    assert name in said["message"] and "\n" not in said["message"]
    assert positions_read(complete(url, 1, None, sparse_attn=None)) == 64


def test_settings_and_metrics(url: str) -> None:
    params = ask(f"{url}/props")["default_generation_settings"]["params"]
    assert params["sparse_attn"] == SERVERS

    complete(url, 1, None)
    before = metrics(url)
    complete(url, 1, None)
    complete(url, 1, "dense")
    after = metrics(url)
    more = {name: after[name] - before.get(name, 0) for name in after}
    calls = (ASKED["n_predict"] - 1) * N_LAYER
    by = 'sparq:attention_calls_total{{by="{}",reason=""}}'
    assert more[by.format("sparse")] == more[by.format("dense")] == calls
    assert more[by.format("prompt")] > 500
    assert more["sparq:decoded_tokens_total"] == 2 * calls / N_LAYER
    assert 0 < more["sparq:bytes_read_total"] < more["sparq:bytes_dense_total"]
    assert after["sparq:shadow_bytes"] > 0
    assert [s["id"] for s in ask(f"{url}/slots")] == list(range(N_SLOT))


def test_a_server_without_sparse_attention(server_dir: Path, tiny: Path, tmp_path: Path) -> None:
    """It has no shadow to begin with: refused, and nothing about it in replies."""
    with serving(server_dir, tmp_path / "log", "-m", tiny, "-t", 1, "-c", 1024, "--metrics") as url:
        with pytest.raises(urllib.error.HTTPError, match="400") as error:
            complete(url, 1, "sparq,ratio=1/8")
        assert "; hint: " in error.value.read().decode()
        assert "sparse_attn" not in complete(url, 1, "off")["timings"]
        assert ask(f"{url}/props")["default_generation_settings"]["params"]["sparse_attn"] == "off"
        assert "sparq:" not in text(f"{url}/metrics")


@pytest.fixture(params=["f16", "q4"])
def pair(
    request: pytest.FixtureRequest, server_dir: Path, tiny: Path, tmp_path: Path
) -> Iterator[str]:
    """A server with two slots and a bound below which requests are exact."""
    line = ("-m", tiny, "-t", 1, "-np", 2, "-c", 4096, "--no-kv-unified", "--cache-ram", 0)
    spec = f"sparq,rank=8,topk=64,min_ctx=256,shadow={request.param}"
    with serving(server_dir, tmp_path / "log", *line, "--sparse-attn", spec) as address:
        yield address


def said_and_read(url: str, n: int, seed: int = 1, **more: Any) -> tuple[str, dict[str, Any]]:
    answer = complete(url, seed, None, prompt=text_of(n, seed), **{"id_slot": 0, **more})
    return answer["content"], answer["timings"]["sparse_attn"]


@pytest.mark.parametrize("n", [200, 1100])
def test_beside_a_longer_request(pair: str, n: int) -> None:
    """Neither min_ctx nor the runs that tell the spread of K go by the longest of a batch."""
    want = said_and_read(pair, n)
    body = {"prompt": text_of(1600, 2), **ASKED, "id_slot": 1, "n_predict": 400}
    with closing(sent(pair, body)) as connection:
        other = events(connection)
        next(other)
        assert said_and_read(pair, n) == want


def test_after_what_a_slot_held_before(pair: str) -> None:
    """Cells that were removed have no say in the range of a run: after a longer prompt, and when
    the same one comes again, whose reply has crossed the end of a group."""
    want = said_and_read(pair, 310)
    said_and_read(pair, 500, 2)
    assert said_and_read(pair, 310) == want
    for _ in range(2):
        assert said_and_read(pair, 310, cache_prompt=True) == want
