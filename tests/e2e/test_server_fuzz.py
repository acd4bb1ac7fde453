"""Generated requests to llama-server: none may end it, hang it, or make it grow.

SPARQ_FUZZ_REQUESTS=100000 sends more of them; SPARQ_FUZZ_SEED=100 takes others.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from server import ask, resident, started

N = int(os.environ.get("SPARQ_FUZZ_REQUESTS", "1000"))
SEED = int(os.environ.get("SPARQ_FUZZ_SEED", "0"))
HANGS_S = 60  # a request that takes longer
# bytes of resident memory that may be added after the first requests; over 60,000 stock adds 80 MB
GROWTH = (64 if N < 60_000 else 128) << 20
WARM = 5000  # requests that fill what a server keeps, stock's as well; of fewer, the first tenth
SPEC = "sparq,rank=8,topk=64,min_ctx=0"
KEYS = ("ratio", "rank", "topk", "k", "local", "sinks", "min_k", "min_ctx", "mean_v", "shadow")
KEYS += ("budget", "top_p", "cap", "k_layers", "rank_layers", "prompt", "gpu_min_mb")
WORDS = ["", "1", "0", "-1", "1/8", "1e999", "nan", "f16", "on", "64:64", "dense", "9" * 30, "\x00"]
JUNK: list[Any] = [None, True, -1, 0, 2**63, 1e308, "", "x" * 70_000, [], {}, [[]], {"a": {}}]
JUNK += [[None], -0.0, "\ud800", "�" * 9, [1, "2", {}], 2**31 - 1]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "one two", "n_predict": 3, "sparse_attn": SPEC}),
    ("/completion", {"prompt": [5, 6, 7], "n_predict": 2, "stream": True, "id_slot": 1}),
    ("/completion", {"prompt": "a", "n_predict": 4, "grammar": 'root ::= "a" | "c"', "n_probs": 3}),
    ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 3, "n": 2}),
    ("/v1/chat/completions", CHAT | {"sparse_attn": "dense", "temperature": 0.5}),
    ("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 3, "sparse_attn": "off"}),
    ("/v1/messages", CHAT | {"model": "m"}),
    ("/apply-template", {"messages": CHAT["messages"]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/slots/0?action=erase", {}),
    ("/slots/0?action=save", {"filename": "../../x"}),
    ("/slots/9?action=restore", {"filename": "/etc/passwd"}),
]
PATHS = ["/", "/props", "/slots", "/metrics", "/../../etc/passwd", "/slots/-1", "/%00"]


def spec(rng: random.Random) -> str:
    """Settings of attention: now and then right ones."""
    keys = [f"{rng.choice(KEYS)}={rng.choice(WORDS)}" for _ in range(rng.randrange(4))]
    return ",".join([rng.choice(["sparq", "topk", "dense", "off", "spark", ""]), *keys])


def changed(rng: random.Random, value: Any) -> Any:
    """A value of JSON with something in it replaced, dropped, added or nested."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key, out = rng.choice(list(value)), dict(value)
        match rng.randrange(4):
            case 0:
                del out[key]
            case 1:
                out[rng.choice([*value, "n_keep", "logit_bias", "sparse_attn", "?"])] = junk(rng)
            case _:
                out[key] = changed(rng, value[key])
        return out
    if isinstance(value, list) and value and rng.random() < 0.6:
        i = rng.randrange(len(value))
        return [*value[:i], changed(rng, value[i]), *value[i + 1 :]]
    return junk(rng)


def junk(rng: random.Random) -> Any:
    if rng.random() < 0.2:
        return spec(rng)
    value = rng.choice(JUNK)
    for _ in range(rng.choice([0, 0, 0, 3, 200])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def damaged(rng: random.Random, body: bytes) -> bytes:
    """The same bytes with a piece cut out, doubled or overwritten."""
    a, b = sorted(rng.randrange(len(body) + 1) for _ in range(2))
    return body[:a] + rng.choice([b"", body[a:b] * 2, rng.randbytes(9), b"[" * 5000]) + body[b:]


def request(rng: random.Random) -> tuple[str, bytes]:
    """A request as bytes, and what kind it is."""
    if rng.random() < 0.05:
        return "path", f"GET {rng.choice(PATHS)} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    path, value = rng.choice(BODIES)
    kind = rng.choice(["right", "spec", "changed", "changed", "damaged", "length", "half", "bytes"])
    if kind == "spec":
        value = value | {"sparse_attn": spec(rng)}
    for _ in range(rng.randrange(1, 4) if kind == "changed" else 0):
        value = changed(rng, value)
    body = json.dumps(value).encode()
    if kind == "damaged":
        body = damaged(rng, body)
    if kind == "bytes":
        return kind, rng.randbytes(rng.randrange(200))
    size = len(body) + (rng.choice([-3, 7, 10**12]) if kind == "length" else 0)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = f"{head}Content-Length: {size}\r\nConnection: close\r\n\r\n".encode() + body
    return kind, whole[: rng.randrange(len(whole))] if kind == "half" else whole


def send(port: int, data: bytes, patient: bool) -> int:
    """The status of the answer, 0 if there is none. An impatient client leaves at once."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as s:
        try:
            s.sendall(data)
            if not patient:
                return 0
            s.shutdown(socket.SHUT_WR)
            answer = b""
            while part := s.recv(1 << 16):
                answer = answer or part
        except (BrokenPipeError, ConnectionResetError):
            return 0
    found = re.match(rb"HTTP/1\.1 (\d+)", answer)
    return int(found[1]) if found else 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is told by /proc")
def test_generated_requests(server_dir: Path, tiny_chat: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    seen: Counter[tuple[str, int]] = Counter()
    line = ("-m", tiny_chat, "-t", 1, "-np", 3, "-c", 768, "--metrics", "--slots", "--sparse-attn")
    # the cache of prompts may grow to its limit
    line = (*line, SPEC, "--slot-save-path", tmp_path, "--cache-ram", 0)
    with started(server_dir, tmp_path / "log", *line) as (url, pid):
        port, before = int(url.rpartition(":")[2]), 0
        for i in range(N):
            kind, data = request(rng)
            try:
                status = send(port, data, patient=rng.random() < 0.9)
            except OSError as error:
                pytest.fail(f"request {i} ({kind}): {error!r}: {data[:2000]!r}")
            seen[kind, status] += 1
            if i == (WARM if N > 2 * WARM else N // 10):
                before = resident(pid)
        assert ask(f"{url}/health") == {"status": "ok"}
        answer = ask(f"{url}/completion", BODIES[0][1] | {"prompt": "x" * 99, "ignore_eos": True})
        assert answer["timings"]["sparse_attn"]["calls_sparse"] > 0
        assert resident(pid) - before < GROWTH
    statuses = Counter(status for (_, status), n in seen.items() for _ in range(n))
    assert statuses[200] > N / 10 < statuses[400], statuses
    assert set(statuses) <= {0, 200, 400, 403, 404, 405, 413, 414, 415, 500, 501}, statuses
    assert not list(tmp_path.parent.glob("x*")), "a file outside of the folder of slots"
