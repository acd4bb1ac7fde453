"""OpenAI's own Python package as a client of llama-server: what it asks for works, and runs sparse.

The model's texts are random bytes. A grammar makes them letters, which are the same in one piece
and in many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from server import serving
from test_server import N_HEAD_KV, N_LAYER, SERVERS
from tiny import N_SPECIAL, text_of, write_tiny_gguf

TEMPLATE = (  # a call of a tool is its JSON, and nothing around it
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
N_SLOT, N_CTX, N_TOKEN = 2, 2048, 24  # slots, positions of each, and tokens of a reply
TOP_K = 64  # positions that a reply with the settings SERVERS reads for a token
JSON_TOKENS = 1000  # more than the longest JSON with all the blanks that its grammar lets through

APIS: dict[str, tuple[Callable[[Any], str], Callable[[Any], str | None]]] = {
    # where the text is in a whole reply, and in a piece of a streamed one
    "chat": (lambda r: r.choices[0].message.content, lambda p: p.choices[0].delta.content),
    "completions": (lambda r: r.choices[0].text, lambda p: p.choices[0].text),
    "responses": (lambda r: r.output_text, lambda p: getattr(p, "delta", None)),
}


class Pet(BaseModel, extra="forbid"):
    """What replies have to fit: a schema, and the check of it."""

    name: str = Field(pattern="^[a-z]{3,8}$")
    age: int = Field(ge=0, le=99)
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "pets.gguf", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def client(server_dir: Path, model: Path, tmp_path_factory: Any) -> Iterator[openai.OpenAI]:
    """A client of a server of its own. It uses no proxy, and asks once."""
    log = tmp_path_factory.mktemp("server") / "log"
    line = ("-m", model, "-t", 1, "-np", N_SLOT, "-c", N_SLOT * N_CTX, "--no-kv-unified")
    line += ("--context-shift", "--no-cache-prompt", "--sparse-attn", SERVERS)
    with (
        serving(server_dir, log, *line) as url,
        openai.DefaultHttpxClient(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=60, http_client=http
        ) as client,
    ):
        yield client


def create(client: openai.OpenAI, api: str, prompt: str = text_of(200), **more: Any) -> Any:
    """A reply, or a stream of one, of the API with this name."""
    asked: dict[str, Any] = {"model": "any", "temperature": 0}
    if api == "responses":
        return client.responses.create(
            **asked | {"input": prompt, "max_output_tokens": N_TOKEN} | more
        )
    asked["max_tokens"] = N_TOKEN
    if api == "completions":
        return client.completions.create(**asked | {"prompt": prompt} | more)
    return client.chat.completions.create(**asked | {"messages": messages(prompt)} | more)


def messages(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def letters(spec: str = SERVERS) -> dict[str, Any]:
    """Fields that are not OpenAI's: they ask for letters, with these settings of attention."""
    fields = {"grammar": "root ::= [a-z]*", "ignore_eos": True, "sparse_attn": spec}
    return {"extra_body": fields}


def ran_sparse(timings: dict[str, Any], n_token: int = N_TOKEN, topk: int = TOP_K) -> None:
    """Each token after the first read `topk` positions in every layer and KV head."""
    read = timings["sparse_attn"]
    assert read["steps"] == n_token - 1 > 0
    assert read["calls_sparse"] == read["steps"] * N_LAYER and read["calls_dense"] == 0
    assert read["positions_read"] == read["calls_sparse"] * N_HEAD_KV * topk


@pytest.mark.parametrize(("spec", "topk"), [(SERVERS, TOP_K), ("sparq,rank=4,topk=90", 90)])
@pytest.mark.parametrize("api", APIS)
def test_a_reply_and_its_stream(client: openai.OpenAI, api: str, spec: str, topk: int) -> None:
    """The same text in one piece and in many, and what was read, as often."""
    whole, piece = APIS[api]
    reply = create(client, api, **letters(spec))
    assert re.fullmatch(f"[a-z]{{{N_TOKEN}}}", whole(reply))
    ran_sparse(reply.timings, N_TOKEN, topk)
    *pieces, last = create(client, api, stream=True, **letters(spec))
    assert "".join(piece(p) or "" for p in pieces) == whole(reply) and len(pieces) >= N_TOKEN
    ran_sparse(last.timings, N_TOKEN, topk)


def test_tools(client: openai.OpenAI) -> None:
    """A call in one piece and in many; then a reply to what the tool has said."""
    tools = {"tools": [openai.pydantic_function_tool(Pet, name="adopt")]}
    call_it = tools | {"tool_choice": "required", "max_tokens": JSON_TOKENS}
    # any text may stand before a call; with this none does
    call_it["logit_bias"] = {str(N_SPECIAL + ord("{")): 50}
    reply = create(client, "chat", **call_it)
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "adopt"
    Pet.model_validate_json(call.function.arguments)
    ran_sparse(reply.timings, reply.usage.completion_tokens)

    pieces = list(create(client, "chat", stream=True, **call_it))
    deltas = [d for p in pieces for d in p.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "adopt" and deltas[0].id and len(deltas) > 10
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
    ran_sparse(pieces[-1].timings, reply.usage.completion_tokens)

    said = [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    after = {"messages": messages("a pet") + said, "tool_choice": "none"}
    reply = create(client, "chat", **tools, **after)
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls
    ran_sparse(reply.timings)
