"""serve: OpenAI's API of llama-cpp-python's server, on our library."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyorch import engine
from pyorch.cli import serve

LACKING = [name for name in serve.NEEDED if importlib.util.find_spec(name) is None]


def post(url: str, value: dict[str, Any] | bytes, key: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    request = urllib.request.Request(url, body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.skipif(bool(LACKING), reason=f"the extra `server` is not installed: {LACKING}")
def test_serve(demo_model: Path) -> None:
    main = [sys.executable, "-c", "from pyorch.cli import main; main()", "serve"]
    settings = ["--ratio", "1/8", "--attn-min-ctx", "0", "--ctx", "1024", "-t", "1"]
    args = [*main, "-m", str(demo_model), "--port", "0", "--api-key", "k", *settings]
    with subprocess.Popen(
        args, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    ) as server:
        assert server.stderr is not None
        try:
            first, ready = server.stderr.readline(), server.stderr.readline()
            assert first == "demo.gguf, attention sparq,ratio=1/8,min_ctx=0, 1024 positions\n"
            assert ready.startswith("http://127.0.0.1:") and "/v1 is ready" in ready
            url = ready.split()[0]
            prompt = {"prompt": "It was a dark night. " * 30, "max_tokens": 8, "temperature": 0}
            answer = post(f"{url}/completions", prompt, "k")
            assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"]
            with pytest.raises(urllib.error.HTTPError, match="401"):
                post(f"{url}/completions", prompt, "wrong")
            for body in (b"{no json", b"\xff"):
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    post(f"{url}/completions", body, "k")
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            assert post(f"{url}/chat/completions", chat, "k")["choices"][0]["message"]["content"]
        finally:
            server.send_signal(signal.SIGINT)
        rest = server.stderr.read()
    assert server.returncode == 0
    assert (
        "Traceback" not in rest
        and rest.startswith("10 tokens decoded, ")
        and " 0.0 % of" not in rest
    )


@pytest.mark.skipif(bool(LACKING), reason=f"the extra `server` is not installed: {LACKING}")
def test_layers_on_a_gpu(run: Callable[..., Any], tiny: Path) -> None:
    result = run("serve", "-m", tiny, "--port", "0", "-ngl", "7")
    assert result.code == 2 and "7 layers cannot go to a GPU" in result.err


@pytest.mark.skipif(bool(LACKING), reason=f"the extra `server` is not installed: {LACKING}")
def test_memory_is_placed_as_asked(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []

    def init(strategy: int) -> None:  # the library's is for good
        placed.append(strategy)
        raise ValueError("enough")

    monkeypatch.setattr(engine.library().lib, "llama_numa_init", init)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: pytest.fail("serves"))
    for name, number in engine.NUMA.items():
        assert "enough" in run("serve", "-m", tiny, "--port", "0", "--numa", name).err
        assert placed.pop() == number and not placed


@pytest.mark.skipif(bool(LACKING), reason=f"the extra `server` is not installed: {LACKING}")
def test_rope_is_as_in_other_commands(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not given is the model's own, not the server's default."""
    seen = []

    def init(model: object, params: Any) -> None:
        seen.append({n: getattr(params, n) for n, _ in params._fields_})

    bindings = engine.library().lib
    monkeypatch.setattr(bindings, "llama_init_from_model", init)
    scaled = ("--rope-scaling", "yarn", "--rope-scale", 2, "--yarn-orig-ctx", 4096)
    wanted = bindings.llama_context_default_params()
    for options in ((), (*scaled, "--ctx", 5000)):
        assert run("serve", "-m", tiny, "--port", "0", *options).code == 1
    for name in (n for n, _ in wanted._fields_ if n.startswith(("rope_", "yarn_"))):
        assert seen[0][name] == getattr(wanted, name), name
    given = {k: seen[1][k] for k in ("rope_scaling_type", "rope_freq_scale", "yarn_orig_ctx")}
    assert given == {"rope_scaling_type": 2, "rope_freq_scale": 0.5, "yarn_orig_ctx": 4096}


def test_without_the_extra(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "uvicorn" else find(name, *a)
    )
    result = run("serve", "-m", tiny)
    assert (
        result.code == 1 and "uvicorn" in result.err and "pip install -e '.[server]'" in result.err
    )


def test_a_port_in_use(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "NEEDED", ())
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("serve", "-m", tiny, "--port", other.getsockname()[1])
    assert result.code == 1 and "cannot listen on 127.0.0.1:" in result.err
    assert result.err.endswith("hint: another program listens there: --port 0 takes a free one\n")
    result = run("serve", "-m", tiny, "--host", "256.1.1.1")
    assert result.code == 1 and "an address of this machine" in result.err
    assert "while attempting" not in result.err
