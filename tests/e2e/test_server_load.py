"""llama-server under load: 16 clients that stream, a third of whom leave.

SPARQ_LOAD_SECONDS=600 makes each load so long, in place of 10 s.
"""

from __future__ import annotations

import os
import random
import time
import urllib.error
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from server import ask, events, metrics, resident, sent, started

from pyorch import paths

SECONDS = float(os.environ.get("SPARQ_LOAD_SECONDS", "10"))
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
# longer views of the cache, are made in another order.
CLEAR = 1e-3
SHADOWS = ["f16", "q4"]
# Most that the largest resident memory in the last third of a load may be above that in the second
# one. It grows by 0.4 MiB in 10 s and in 60 s.
GROWTH = 2 << 20
CALLS = ("sparse", "dense", "prompt")  # as /metrics counts attention, for each token and layer


@dataclass(frozen=True)
class Asked:
    """A request, its reply when it is alone, and what that has read."""

    body: dict[str, Any]
    text: str
    read: dict[str, Any]


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
    """Clients that ask until the time is up."""

    def __init__(self, url: str, asked: Sequence[Asked], seconds: float):
        self.url, self.asked = url, asked
        self.end = time.monotonic() + seconds
        self.seen: Counter[str] = Counter()
        self.lock = Lock()

    def client(self, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self.end:
            cause, n_piece = self.request(rng, rng.choice(self.asked))
            with self.lock:
                self.seen.update({cause: 1, "pieces": n_piece})

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
def test_many_clients(server_dir: Path, tiny: Path, shadow: str, tmp_path: Path) -> None:
    line = ["-m", tiny, "-t", 1, "-np", N_SLOT, "-c", N_SLOT * N_CTX, "--no-kv-unified", "-b", 256]
    line += ["-ub", 128, "-fa", "on", "--cache-ram", 64, "--metrics"]
    line += ["--sparse-attn", f"{SERVERS},shadow={shadow}"]
    memory = []
    with (
        started(server_dir, tmp_path / "log", *line) as (url, pid),
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
    _, middle, last = (int(max(part)) for part in np.array_split(memory, 3))
    calls = {by: found[f'sparq:attention_calls_total{{by="{by}",reason=""}}'] for by in CALLS}
    assert min(seen[cause] for cause in ("finished", "cancelled", "refused")) > 0
    assert calls["sparse"] > 0 < calls["dense"]
    cancelled = (tmp_path / "log").read_text(errors="replace").count("cancel task")
    assert cancelled > 0.9 * seen["cancelled"], "the server has noticed"
    assert last - middle < GROWTH, memory
