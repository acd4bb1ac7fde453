"""llama-server under load: 16 clients that stream, a third of whom leave; and kill -9 amid them.

SPARQ_LOAD_SECONDS=600 makes each load so long, in place of 10 s. From a minute on the same is done
with SmolLM2-135M-Instruct, where `sparq-cpp pull smollm2-135m-instruct` has put it.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import pytest
from server import HANGS_S, ask, events, resident, sent, started, text

from pyorch import paths
from pyorch.models import cards, wheel

SECONDS = float(os.environ.get("SPARQ_LOAD_SECONDS", "10"))
REAL, REAL_S = "smollm2-135m-instruct", 60  # a model with sense, and from which length on it serves
N_CLIENT, N_SLOT, N_CTX, N_TOKEN = 16, 4, 1536, 32  # positions of a slot, tokens of a reply

# Tokens of a prompt, and its attention. Up to min_ctx positions it is exact, whatever others have.
SERVERS = "sparq,ratio=1/8,min_ctx=256"
REQUESTS: Sequence[tuple[int, str]] = [
    (20, SERVERS),
    (100, "dense"),
    (200, "sparq,ratio=1/4"),
    (290, SERVERS),
    (330, "sparq,ratio=1/4"),
    (400, "sparq,rank=8,topk=64"),
    (512, "sparq,ratio=1/16,min_k=16"),
    (640, "dense"),
    (800, SERVERS),
    (950, "sparq,ratio=1/4"),
    (1100, "sparq,rank=8,topk=64"),
    (1300, "sparq,ratio=1/16,min_k=16"),
]
# A reply is compared up to its first token whose two best logits are as close as this. What else is
# in a batch moves those of `tiny`, whose weights are f32, by 4e-5: sums over several rows, and over
# longer views of the cache, are made in another order. Those of the real model keep their bits.
CLEAR = 1e-3
SHADOWS = ["f16", "q4"]
# Most that the largest resident memory in the last third of a load may be above that in the second
# one, in bytes and as a share. `tiny` grows by 0.4 MiB in 10 s and in 60 s. Prompts that a server
# keeps come and go, 30 MB at a time with the real model, which therefore keeps those of slots only.
GROWTH, GROWTH_SHARE = 2 << 20, 0.02
CALLS = ("sparse", "dense", "prompt")  # as /metrics counts attention, for each token and layer


@dataclass(frozen=True)
class Asked:
    """A request, its reply when it is alone, and what that has read."""

    body: dict[str, Any]
    text: str
    read: dict[str, Any]


@pytest.fixture(scope="module", params=["tiny", REAL])
def model(request: pytest.FixtureRequest, tiny: Path) -> Path:
    if request.param == "tiny":
        return tiny
    package = cards.load(REAL).package
    assert package
    path = wheel.path_of(package)
    if SECONDS < REAL_S or not path.is_file():
        pytest.skip("for long loads, with the model")
    return path


@contextmanager
def served(
    tools: Path, model: Path, folder: Path, shadow: str = "f16", ends: int = 0
) -> Iterator[tuple[str, int]]:
    ram = 64 if model.name == "tiny.gguf" else 0
    line = ["-m", model, "-t", 1, "-np", N_SLOT, "-c", N_SLOT * N_CTX, "--no-kv-unified", "-b", 256]
    line += ["-ub", 128, "-fa", "on", "--cache-ram", ram, "--metrics", "--slot-save-path", folder]
    line += ["--sparse-attn", f"{SERVERS},shadow={shadow}"]
    with started(tools, folder / "log", *line, ends=ends) as found:
        yield found


def reply(url: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a whole reply, and its events."""
    with closing(sent(url, body)) as connection:
        found = list(events(connection))
    if not found or not found[-1].get("stop"):
        raise ConnectionError(f"a reply without an end: {found[-1:]}")
    return "".join(e["content"] for e in found), found


def alone(url: str) -> list[Asked]:
    """Each request when there is no other, and all of its prompt is read."""
    story = (paths.data("models") / "demo" / "story.txt").read_text("utf-8")
    tokens, out = ask(f"{url}/tokenize", {"content": story})["tokens"], []
    for n, spec in REQUESTS:
        # A third of it is the story's beginning. None goes on from the whole of another, since it
        # could meet tokens of a reply in the cache, and what sparse attention made of them.
        prompt = tokens[: n // 3] + tokens[2 * n : 3 * n - n // 3]
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
        body |= {"n_predict": N_TOKEN, "sparse_attn": spec}
        content, found = reply(url, body | {"cache_prompt": False, "n_probs": 2})
        best = [p["top_logprobs"] for e in found for p in e.get("completion_probabilities", [])]
        close = [a["logprob"] - b["logprob"] < CLEAR for a, b in best]
        if True in close:
            body["n_predict"] = close.index(True)
            content, found = reply(url, body | {"cache_prompt": False})
        out.append(Asked(body, content, found[-1]["timings"]["sparse_attn"]))
    assert sum(a.body["n_predict"] for a in out) > len(out) * N_TOKEN / 2
    return out


class Load:
    """Clients that ask until the time is up, or the server is killed."""

    def __init__(self, url: str, asked: Sequence[Asked], seconds: float):
        self.url, self.asked = url, asked
        self.end = time.monotonic() + seconds
        self.seen: Counter[str] = Counter()
        self.lock, self.killed = Lock(), Event()

    def client(self, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self.end:
            try:
                cause, n_piece = self.request(rng, rng.choice(self.asked))
            except (OSError, http.client.HTTPException):
                cause, n_piece = "killed", 0
                if not self.killed.is_set():
                    raise
            with self.lock:
                self.seen.update({cause: 1, "pieces": n_piece})
            if cause == "killed":
                return

    def request(self, rng: random.Random, asked: Asked) -> tuple[str, int]:
        """Why it has ended, and after how many pieces."""
        kind = rng.random()
        if kind < 0.05:
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(f"{self.url}/completion", asked.body | {"sparse_attn": "sparq,ratio=2"})
            return "refused", 0
        if kind < 0.05 + 1 / 3:  # by a client that leaves after some pieces, or before the first
            with closing(sent(self.url, asked.body | {"n_predict": N_CTX})) as connection:
                return "cancelled", len(list(islice(events(connection), rng.randrange(6))))
        content, found = reply(self.url, asked.body)
        assert found[-1]["timings"]["sparse_attn"] == asked.read
        assert content == asked.text, asked.read
        return "finished", len(found) - 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by /proc")
@pytest.mark.parametrize("shadow", SHADOWS)
def test_many_clients(server_dir: Path, model: Path, shadow: str, tmp_path: Path) -> None:
    memory = []
    with (
        served(server_dir, model, tmp_path, shadow) as (url, pid),
        ThreadPoolExecutor(N_CLIENT) as pool,
    ):
        load = Load(url, alone(url), SECONDS)
        clients = [pool.submit(load.client, i) for i in range(N_CLIENT)]
        while not any(c.done() for c in clients):
            memory.append(resident(pid))
            time.sleep(0.1)
        load.end = 0  # if one has failed
        for client in clients:
            client.result()
        seen, found = load.seen, metrics(url)
        for _ in range(100):
            if not found["llamacpp:requests_processing"] + found["llamacpp:requests_deferred"]:
                break
            time.sleep(0.1)
            found = metrics(url)
        else:
            pytest.fail(f"slots that nobody waits for: {found}")
    first, middle, last = (int(max(part)) for part in np.array_split(memory, 3))
    calls = {by: found[f'sparq:attention_calls_total{{by="{by}",reason=""}}'] for by in CALLS}
    grown = " ".join(f"{n / 2**20:.1f}" for n in (first, middle, last))
    print(f"{SECONDS:g} s: {dict(seen)}, calls {calls}, at most {grown} MiB in thirds")
    assert min(seen[cause] for cause in ("finished", "cancelled", "refused")) > 0
    assert calls["sparse"] > 0 < calls["dense"]
    cancelled = (tmp_path / "log").read_text(errors="replace").count("cancel task")
    assert cancelled > 0.9 * seen["cancelled"], "the server has noticed"
    assert last - middle < max(GROWTH, GROWTH_SHARE * middle), memory


def metrics(url: str) -> dict[str, float]:
    lines = re.findall(r"^(\S+:\S+) (\S+)$", text(f"{url}/metrics"), re.M)
    return {name: float(value) for name, value in lines}


def test_killed_under_load(server_dir: Path, model: Path, tmp_path: Path) -> None:
    """A slot that was saved before replies as it did; half a file of one is refused."""
    with served(server_dir, model, tmp_path, ends=-signal.SIGKILL) as (url, pid):
        asked = alone(url)
        slot = asked[-1].body | {"id_slot": 0}
        ask(f"{url}/completion", slot | {"n_predict": 0})
        ask(f"{url}/slots/0?action=save", {"filename": "kept"})
        load = Load(url, asked, HANGS_S)
        with ThreadPoolExecutor(N_CLIENT) as pool:
            clients = [pool.submit(load.client, i) for i in range(N_CLIENT)]
            while load.seen["finished"] < N_SLOT and not any(c.done() for c in clients):
                time.sleep(0.01)
            load.killed.set()
            os.kill(pid, signal.SIGKILL)
        for client in clients:
            client.result()
    assert load.seen["killed"] == N_CLIENT

    kept = (tmp_path / "kept").read_bytes()
    (tmp_path / "half").write_bytes(kept[: len(kept) // 2])
    with served(server_dir, model, tmp_path) as (url, _):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(f"{url}/slots/0?action=restore", {"filename": "half"})
        n = ask(f"{url}/slots/0?action=restore", {"filename": "kept"})["n_restored"]
        content, found = reply(url, slot)
        assert content == asked[-1].text and found[-1]["timings"]["cache_n"] >= n - 1 > 1000
        assert found[-1]["timings"]["sparse_attn"] == asked[-1].read
        assert asked[-1].read["calls_sparse"] > 0
