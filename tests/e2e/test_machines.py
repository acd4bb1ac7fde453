"""Layers on other machines: the bits of one process, the greeting, and what a lost worker does."""

from __future__ import annotations

import ctypes
import functools
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny as tiny_models
from link import Link
from link import local_worker as worker
from llama import from_child

from pyorch import engine
from pyorch.attention.placement import split_layers
from pyorch.engine import document_file, machines
from pyorch.errors import SparqError
from pyorch.models import synth

HERE = Path(__file__).parent
SPARQ = "sparq,rank=8,topk=64,min_ctx=0"
N_LAYER, N_PROMPT, N_DECODE, N_BATCH = 4, 600, 40, 512  # of away.py
N_WORKERS = 3


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [stack.enter_context(worker(folder / f"{i}.log"))[0] for i in range(N_WORKERS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("m") / "m.gguf", "llama", n_layer=N_LAYER)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sliding windows in some layers."""
    return tiny_models.write(tmp_path_factory.mktemp("m") / "w.gguf", "gemma3", n_layer=N_LAYER)


@pytest.fixture(scope="module")
def run() -> Callable[..., dict[str, Any]]:
    """run(model, spec, workers, other options of away.py)."""

    @functools.cache
    def go(model: Path, spec: str, workers: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
        text = json.dumps({"spec": spec, "workers": workers, **options})
        return from_child(HERE / "away.py", model, text)

    return go


# ---- the bits of one process ----

VARIANTS = {
    "sparq": (SPARQ, {}),
    "sequences": (SPARQ, {"n_sequences": 3}),
    "q8_0": (SPARQ, {"type_k": "q8_0", "type_v": "q8_0"}),
    "f16 shadow, mean of V": (SPARQ + ",mean_v=on,shadow=f16", {}),
    "f32 prompt": (SPARQ + ",prompt=f32", {}),
    "topk": ("topk,k=64,min_ctx=0", {}),
    "dense": ("dense", {}),
    "short": ("sparq", {}),  # below min_ctx: our exact attention, as on one CPU
}


@pytest.mark.parametrize("name", VARIANTS)
def test_two_workers(name: str, model: Path, workers: list[str], run) -> None:
    """Prompt and replies run where K lies, with the bits and the counters of one process."""
    spec, options = VARIANTS[name]
    got = run(model, spec, tuple(workers[:2]), tensor_split=(1, 3), **options)
    want = run(model, spec, **options)
    assert got["bits"] == want["bits"]
    here, *there = got["info"].pop("devices")
    want["info"].pop("devices")
    assert got["info"] == want["info"]
    assert here["calls_sparse"] == here["bytes_read"] == here["shadow_bytes"] == 0
    counters = got["info"]["counters"]
    assert counters["calls_stock"] == 0 and counters["calls_prefill"] > 0
    if name not in ("dense", "short"):
        n_seq = options.get("n_sequences", 1)
        assert counters["calls_sparse"] == N_DECODE * n_seq * N_LAYER
        assert all(x["calls_sparse"] > 0 and x["bytes_read"] > 0 for x in there)
    assert sum(x["bytes_read"] for x in there) == counters["bytes_read"]
    assert sum(x["shadow_bytes"] for x in there) == got["info"]["shadow_bytes"]


@pytest.mark.parametrize("name", VARIANTS)
def test_kv_here_and_weights_there(name: str, model: Path, workers: list[str], run) -> None:
    """-nkvo: this machine attends, and reads prompts, as it does alone."""
    spec, options = VARIANTS[name]
    got = run(model, spec, tuple(workers[:1]), kv_offload=False, **options)
    want = run(model, spec, **options)
    assert got["bits"] == want["bits"]
    assert got["info"]["counters"] == want["info"]["counters"]
    here, *there = got["info"]["devices"]
    assert here["bytes_read"] == got["info"]["counters"]["bytes_read"] > 0
    assert not any(x["bytes_read"] or x["shadow_bytes"] for x in there)


@pytest.mark.parametrize(
    ("n_gpu_layers", "split"), [(99, (1, 1, 1)), (99, (5, 1, 2)), (3, (1, 1, 1))]
)
def test_three_workers(
    n_gpu_layers: int, split: tuple[int, ...], model: Path, workers: list[str], run
) -> None:
    """Uneven parts, and some layers that stay here."""
    options = {"n_gpu_layers": n_gpu_layers, "tensor_split": split}
    got, want = run(model, SPARQ, tuple(workers), **options), run(model, SPARQ)
    assert got["bits"] == want["bits"]
    assert got["info"]["counters"] == want["info"]["counters"]
    calls = {x["name"]: x["calls_sparse"] for x in got["info"]["devices"]}
    layers = split_layers(N_LAYER, split, n_gpu_layers)  # as `explain` says
    n_calls = [N_DECODE * sum(il < N_LAYER for il in part) for part in layers]
    assert [calls[name] for name in sorted(calls)] == n_calls  # CPU, RPC0, RPC1, RPC2


def test_windows(windows: Path, workers: list[str], run) -> None:
    """Prompts of layers with a sliding window are ours too, on the worker that holds them."""
    got, want = run(windows, SPARQ, tuple(workers[:2])), run(windows, SPARQ)
    assert got["bits"] == want["bits"]
    assert got["info"]["counters"] == want["info"]["counters"]


def test_weights_of_few_bits(workers: list[str], tmp_path: Path, run) -> None:
    """A worker takes them as they are, and so does --no-repack."""
    shape = synth.Shape(4, 256, 4, 2, 64, 256, 288, n_ctx=4096)
    synth.write(path := tmp_path / "q4.gguf", shape, "q4_k_m")
    got = run(path, SPARQ, (workers[0],))
    assert got["bits"] == run(path, SPARQ, repack=False)["bits"]


@pytest.mark.parametrize("what", ["restore", "document"])
def test_what_was_saved(what: str, model: Path, workers: list[str], tmp_path: Path, run) -> None:
    """K and V come from the workers, and go back to them: sealed anew, or with the shadow."""
    got = run(model, SPARQ, tuple(workers[:2]), **{what: str(tmp_path / "there")})
    want = run(model, SPARQ, **{what: str(tmp_path / "here")})
    assert got["bits"] == want["bits"]


def test_a_thousand_tokens(model: Path, workers: list[str], run) -> None:
    """With context shifts, which move K on the workers, and seal it anew."""
    options = {"n_decode": 1000, "shift": True}
    got, want = run(model, SPARQ, tuple(workers[:2]), **options), run(model, SPARQ, **options)
    assert got["bits"] == want["bits"]
    counters = got["info"]["counters"]
    assert counters == want["info"]["counters"]
    assert counters["calls_sparse"] == 1000 * N_LAYER


# ---- who is sent what ----


def test_no_other_worker_is_sent_our_op(
    model: Path, workers: list[str], tmp_path: Path, run
) -> None:
    """One of llama.cpp's own keeps its layers to llama.cpp's attention; the others' are sparse."""
    with worker(tmp_path / "log", stock=True) as (foreign, _):
        assert machines.ask(foreign).sparse_version == 0
        got = run(model, SPARQ, (workers[0], foreign), tensor_split=(1, 1))
    states = [layer["state"] for layer in got["info"]["layers"]]
    assert "sparse" in states and "dense" in states
    reasons = {layer["reason"] for layer in got["info"]["layers"]} - {""}
    assert reasons == {"on a worker without our sparse attention"}
    counters = got["info"]["counters"]
    assert counters["calls_sparse"] == N_DECODE * states.count("sparse")
    assert counters["calls_stock"] > 0


def test_what_a_worker_says(workers: list[str]) -> None:
    found = machines.ask(workers[0])
    assert found.sparse_version == machines.sparse_version(engine.library()) > 0
    assert machines.runs_sparse(engine.library(), found)
    assert found.free > 2**28 and 0 < found.round_trip_s < 1


# ---- faults ----


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:0", "a:70000", "a:1:2", "::1", "[::1]:50052"])
def test_no_endpoint(text: str) -> None:
    with pytest.raises(SparqError, match="is not HOST:PORT"):
        machines.parse_endpoint(text)


def test_nobody_there() -> None:
    assert not machines.answers("::1:50052")
    with pytest.raises(SparqError, match="no worker answers at 127.0.0.1"):
        machines.ask(f"127.0.0.1:{closed_port()}")


def test_another_server() -> None:
    """Something that is no worker, and answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            one, _ = server.accept()
            one.recv(64)
            one.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            one.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(SparqError, match="is not a worker"):
            machines.ask(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_busy_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_ANSWER_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(SparqError, match="does not answer"),
    ):
        machines.ask(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("127.0.0.1", "loopback"),
        ("192.168.1.5", "private"),
        ("10.0.0.1", "private"),
        ("8.8.8.8", "public"),
        ("0.0.0.0", "public"),
    ],
)
def test_reach(host: str, reach: str) -> None:
    assert machines.reach(host) == reach


def cli(*args: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pyorch", *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)


LONG = "word " * 400


@pytest.mark.parametrize("when", ["load", "prompt", "decode"])
def test_a_lost_worker(when: str, tiny: Path, tmp_path: Path) -> None:
    """One line, exit code 1, and no wait."""
    with worker(tmp_path / "log") as (endpoint, process), Link(endpoint) as link:
        if when == "load":  # it dies while the weights come
            threading.Thread(target=lambda: dies_after(link, 50_000, process), daemon=True).start()
        line = ["generate", "-m", tiny, "--rpc", link.endpoint, "-a", SPARQ, "-n", 1500]
        child = cli(*line, "-p", LONG * (1 if when == "decode" else 2))
        if when == "prompt":
            threading.Thread(
                target=lambda: dies_after(link, 1_500_000, process), daemon=True
            ).start()
        if when == "decode":
            assert child.stdout is not None
            child.stdout.read(1)  # the first token
            process.send_signal(signal.SIGKILL)
        started = time.monotonic()
        out, err = child.communicate(timeout=60)
        assert time.monotonic() - started < 30
    assert child.returncode == 1, err
    said = [line for line in err.splitlines() if line.startswith(("error:", "hint:"))]
    assert len(said) == 2 and re.search("worker", said[0]), err
    assert "Traceback" not in err and "ggml-rpc.cpp" not in err


VANISHED = """
ip link set lo up
"$0" -m pyorch worker --port 50099 -t 1 &
worker=$!
until "$0" -m pyorch generate -m "$1" --rpc 127.0.0.1:50099 -n 1 -p a &>"$2"; do sleep 0.2; done
: >"$2"
"$0" -m pyorch generate -m "$1" --rpc 127.0.0.1:50099 -n 4000 -p a -a dense >"$2" &
reply=$!
until [[ -s $2 ]]; do sleep 0.1; done
ip link set lo down
wait $reply
code=$?
kill $worker
exit $code
"""


@pytest.mark.slow
def test_a_vanished_host(demo_model: Path, tmp_path: Path) -> None:
    """No packet comes back any more, not even a refusal: the time-outs of the connection."""
    apart = ["unshare", "-rn"]
    if not shutil.which("unshare") or subprocess.run([*apart, "ip", "link"]).returncode:
        pytest.skip("no network namespace can be made here")
    argv = [*apart, "bash", "-c", VANISHED, sys.executable, demo_model, tmp_path / "out"]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "error: the worker at 127.0.0.1:50099 is gone" in done.stderr


@pytest.mark.slow
def test_a_worker_that_reads_nothing_for_long_is_waited_for() -> None:
    """As one that computes. After 20 s the system would take it for gone, although it answers."""
    lib = engine.library().lib._lib
    lib.ggml_sparse_rpc_send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    lib.ggml_sparse_rpc_send.restype = ctypes.c_int64
    data, got = b"x" * (32 << 20), 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        lib.ggml_sparse_rpc_keep_alive(near.fileno())

        def read() -> None:
            nonlocal got
            time.sleep(26)
            with suppress(OSError):  # it was reset
                while piece := far.recv(1 << 20):
                    got += len(piece)

        reader = threading.Thread(target=read)
        reader.start()
        n_sent = 0
        while n_sent < len(data):
            n = lib.ggml_sparse_rpc_send(near.fileno(), data[n_sent:], len(data) - n_sent)
            assert n > 0, f"after {n_sent} bytes"
            n_sent += n
        near.shutdown(socket.SHUT_WR)
        reader.join()
    assert got == len(data)


def dies_after(link: Link, n_bytes: int, process: subprocess.Popen[bytes]) -> None:
    """Kill it when it has been sent so many bytes."""
    while link.there < n_bytes and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)


def test_refusals(tiny: Path) -> None:
    for args, said in [
        (("generate", "-m", tiny, "--rpc", "8.8.8.8", "-p", "x"), "could read the text"),
        (
            ("generate", "-m", tiny, "--rpc", f"127.0.0.1:{closed_port()}", "-p", "x"),
            "no worker answers",
        ),
        (("worker", "--host", "0.0.0.0"), "would be open to everybody"),
        (("worker", "--host", "::1", "--insecure"), "IPv4 addresses only"),
    ]:
        child = cli(*args)
        _, err = child.communicate(timeout=60)
        assert child.returncode in (1, 2) and said in err, err
        assert len(err.strip().splitlines()) == 2


def last_note(worker: subprocess.Popen[str]) -> str:
    """What it says when it is ready."""
    assert worker.stderr is not None
    said = [worker.stderr.readline()]
    while "--rpc" not in said[-1]:
        assert said[-1], "".join(said)
        said.append(worker.stderr.readline())
    return said[-1]


def test_a_worker_on_all_addresses_says_a_name_that_others_can_use() -> None:
    port = closed_port()
    child = cli("worker", "--host", "0.0.0.0", "--insecure", "--port", port, "-t", 1)
    assert f"--rpc {socket.gethostname()}:{port} on" in last_note(child)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)


def test_the_command(tiny: Path) -> None:
    """`worker` says when it is ready, serves one program after the other, and ends at a signal."""
    port = closed_port()
    child = cli("worker", "--port", port, "-t", 1)
    assert f"--rpc 127.0.0.1:{port} on the other machine" in last_note(child)
    for _ in range(2):
        done = cli("generate", "-m", tiny, "--rpc", f"127.0.0.1:{port}", "-n", 4, "-p", "a")
        _, err = done.communicate(timeout=120)
        assert done.returncode == 0, err
    taken = cli("worker", "--port", port)
    _, err = taken.communicate(timeout=60)
    assert taken.returncode == 1 and "another program" in err
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 0


def test_a_document_goes_on_after_a_lost_worker(tiny: Path, tmp_path: Path) -> None:
    """What was read until then is kept, and the next worker gets it."""
    text, kept = tmp_path / "text.txt", tmp_path / "text.kv"
    text.write_text("abcdefgh " * 380, "utf-8")
    partial = tmp_path / "text.kv.partial"
    line = ["read", text, "-m", tiny, "-o", kept, "-a", SPARQ, "--plain"]

    def dies_when_some_is_kept(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not n_read(partial):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)

    with worker(tmp_path / "log") as (endpoint, process), Link(endpoint, rate=2e7) as link:
        child = cli(*line, "--rpc", link.endpoint)
        threading.Thread(target=dies_when_some_is_kept, args=(process,), daemon=True).start()
        _, err = child.communicate(timeout=120)
    assert child.returncode == 1 and "worker" in err, err
    n = n_read(partial)
    assert 0 < n < 3420
    with worker(tmp_path / "log2") as (endpoint, _):
        child = cli(*line, "--rpc", endpoint, "--json")
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert json.loads(out)["tokens"] == 3421 and not partial.exists()


def n_read(partial: Path) -> int:
    try:
        return document_file.load(partial, whole=False).n_read
    except (SparqError, OSError):
        return 0


def test_explain(model: Path, workers: list[str]) -> None:
    line = ["explain", "-m", model, "-a", SPARQ, "-c", 2048, "--rpc", ",".join(workers[:2])]
    child = cli(*line, "-ts", "3,1", "-ngl", 4, "--json")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    found = json.loads(out)
    rows = found["machines"]
    assert [x["layers"] for x in rows] == [[0, 1], [1, 4], [4, 5]]
    assert sum(x["cache"] for x in rows) == found["kv_memory"]
    assert sum(x["shadow"] for x in rows) == found["shadow_memory"]
    assert sum(x["weights_read"] for x in rows) == found["weight_bytes_per_token"]
    assert sum(x["read"] for x in rows) == found["attention_bytes_per_token"]
    assert all(x["sparse"] for x in rows) and found["wire_s"] > 0
    assert found["bandwidth"] > 1e8, "bytes per second, as measured"


def test_what_passes_for_a_token_is_what_explain_says(model: Path, workers: list[str]) -> None:
    line = ["explain", "-m", model, "-c", 2048, "--rpc", ",".join(workers[:2]), "-ts", "1,1"]
    with Link(workers[0]) as first, Link(workers[1]) as second:
        for spec in ("off", SPARQ):
            out, err = cli(*line, "-a", spec, "--json").communicate(timeout=120)
            assert out, err
            predicted = sum(x["sent"] + x["received"] for x in json.loads(out)["machines"])
            with engine.load(
                model,
                n_ctx=2048,
                n_threads=1,
                workers=[first.endpoint, second.endpoint],
                tensor_split=[1, 1],
                attention=spec,
            ) as s:
                engine.prefill(s, [5] * 2040)
                for token in (3, 4):  # plans its graphs, and sends them
                    engine.decode(s, token)
                before = first.there + first.back + second.there + second.back
                engine.decode(s, 5)
                passed = first.there + first.back + second.there + second.back - before
            assert passed == pytest.approx(predicted, rel=0.1)


def test_the_split_is_llama_cpps() -> None:
    """By hand: upper_bound of i / n in the running sums."""
    assert split_layers(4, [1, 1]) == [range(0), range(3), range(3, 5)]
    assert split_layers(4, [3, 1], 4) == [range(1), range(1, 4), range(4, 5)]
    assert split_layers(4, [1, 0]) == [range(0), range(5), range(5, 5)]


def test_explain_of_experts(workers: list[str], tmp_path: Path) -> None:
    """Memory holds all of them, a token reads some."""
    path = tiny_models.write(tmp_path / "m.gguf", "gpt-oss", n_layer=2)
    child = cli("explain", "-m", path, "-a", SPARQ, "--rpc", workers[0], "--json")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    found = json.loads(out)
    there = found["machines"][1]
    assert there["weights"] > there["weights_read"] == found["weight_bytes_per_token"]


def test_eval_and_bench(demo_model: Path, workers: list[str], tmp_path: Path) -> None:
    """Stock and ours over the same workers, one program after the other."""
    where = ("-m", demo_model, "--rpc", ",".join(workers[:2]), "-a", "sparq,ratio=1/8,min_ctx=0")
    child = cli("eval", "needle", "--ctx", 1024, "-n", 1, *where, "--out", tmp_path / "eval")
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    first = json.loads((tmp_path / "eval" / "needle.jsonl").read_text().splitlines()[0])
    assert first["case"]["n_workers"] == 2
    child = cli("bench", *where, "-d", 600, "-n", 2, "-r", 2, "-o", "json", "--out", tmp_path)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    rows = json.loads(out)
    assert {r["library"] for r in rows} == {"stock", "sparq"}
    assert all(r["n_workers"] == 2 and r["backends"] == "RPC" for r in rows)


def test_stats_of_a_chat(tiny_chat: Path, workers: list[str]) -> None:
    argv = ["chat", "-m", tiny_chat, "--rpc", ",".join(workers[:2]), "-a", SPARQ, "-n", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "pyorch", *map(str, argv)],
        input="hello\n/stats\n/exit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\S+): (\d+) sparse calls", done.stderr, re.M)
    assert [name for name, _ in lines] == ["CPU", "RPC0", "RPC1"]
    assert int(lines[0][1]) == 0 < int(lines[1][1])


def test_a_lost_worker_of_a_server(server_dir: Path, tiny: Path, tmp_path: Path) -> None:
    with worker(tmp_path / "log") as (endpoint, process):
        child = cli("serve", "-m", tiny, "--rpc", endpoint, "--port", 0, "-a", SPARQ)
        assert child.stderr is not None
        while "is ready" not in (text := child.stderr.readline()):
            assert text
        process.send_signal(signal.SIGKILL)
        url = re.search(r"http://\S+", text)
        assert url
        body = json.dumps({"prompt": "a", "n_predict": 4}).encode()
        with suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(f"{url[0]}/completions", body, timeout=60)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert re.search("^error: llama-server .*: Remote RPC server crashed", err, re.M), err
    assert "ggml-rpc.cpp" not in err
