"""Train the demo model: a small Llama whose attention really retrieves.

One command does everything: byte-level BPE, training, GGUF export.

    pip install '.[train]'
    python models/demo/train.py --data DIR --out RUN --gguf models/demo/demo.gguf

DIR holds plain-text books (*.txt). Stop it at any time: the same command goes on from RUN/last.pt,
and every step draws its batch from (seed, step), so a resumed run sees the data of an unbroken one.

Copying does not appear in a small model within a small budget, so the first weights draft it
(`Llama.prepare`). Training is on prose followed by passages of that prose, and on random tokens
repeated, which nothing but copying predicts, in contexts that grow from 256 to 4096 tokens.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# Never seen in training: they score the model, and the first gives the demo document.
HELD_OUT = (
    "the-wonderful-wizard-of-oz-by-l-frank-baum.txt",
    "charles-dickens-christmas-carol.txt",
    "the-story-of-alchemy-and-the-beginnings-of-chemistry.txt",
)
# A book of quotations repeats lines of other books, of A Christmas Carol too.
LEFT_OUT = ("bartletts-familiar-quotations.txt",)

EOT = "<|endoftext|>"
N_VOCAB = 2048
N_LAYER = 5
N_HEAD = 4
N_KV = 2
D_HEAD = 64
D_MODEL = N_HEAD * D_HEAD
D_FF = 512
ROPE_BASE = 500_000.0
RMS_EPS = 1e-5
N_CTX = 8192  # positions seen in training reach this far (see `positions`)


@dataclass(frozen=True)
class Stage:
    """One leg of the curriculum: `tokens` of training on contexts of `length` tokens.

    `noise` is the share of sequences made of repeated random tokens, `plain` that of prose alone;
    the rest is prose followed by passages of it.
    """

    tokens: int
    length: int
    batch: int  # tokens per step
    noise: float
    plain: float


STAGES = (
    Stage(1_500_000, 256, 8192, 0.40, 0.10),
    Stage(1_500_000, 512, 8192, 0.15, 0.10),
    Stage(2_500_000, 1024, 8192, 0.10, 0.10),
    Stage(2_500_000, 2048, 8192, 0.10, 0.10),
    Stage(700_000, 4096, 8192, 0.10, 0.10),
)
WARMUP = 60  # steps
DECAY = 0.40  # the last share of all tokens, learning rate falling linearly to 3 %


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (D_MODEL,), self.weight.to(x.dtype), RMS_EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs, llama.cpp's own order, so the export needs no permutation.

    x: [batch, time, heads, D_HEAD]; cos, sin: [batch, time, 1, D_HEAD / 2].
    """
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, rows: int = 256) -> Tensor:
    """Causal attention, q already scaled; all [batch, heads, time, D_HEAD].

    By blocks of queries, so that the upper triangle costs nothing: in bfloat16 on a CPU without
    AMX this takes half the time of torch's fused kernel.
    """
    mask = torch.full((rows, rows), -1e4, dtype=q.dtype).triu(1)
    out = []
    for i in range(0, q.shape[2], rows):
        block = q[:, :, i : i + rows]
        n = block.shape[2]
        scores = block @ k[:, :, : i + n].mT
        scores[..., i:] += mask[:n, :n]
        out.append(scores.softmax(-1).to(v.dtype) @ v[:, :, : i + n])
    return torch.cat(out, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = RMSNorm()
        self.q = nn.Linear(D_MODEL, N_HEAD * D_HEAD, bias=False)
        self.k = nn.Linear(D_MODEL, N_KV * D_HEAD, bias=False)
        self.v = nn.Linear(D_MODEL, N_KV * D_HEAD, bias=False)
        self.o = nn.Linear(N_HEAD * D_HEAD, D_MODEL, bias=False)
        self.ffn_norm = RMSNorm()
        self.gate = nn.Linear(D_MODEL, D_FF, bias=False)
        self.up = nn.Linear(D_MODEL, D_FF, bias=False)
        self.down = nn.Linear(D_FF, D_MODEL, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q = rotate(self.q(h).unflatten(-1, (N_HEAD, D_HEAD)), cos, sin).transpose(1, 2)
        k = rotate(self.k(h).unflatten(-1, (N_KV, D_HEAD)), cos, sin).transpose(1, 2)
        v = self.v(h).unflatten(-1, (N_KV, D_HEAD)).transpose(1, 2)
        k = k.repeat_interleave(N_HEAD // N_KV, 1)
        v = v.repeat_interleave(N_HEAD // N_KV, 1)
        y = attend(q * D_HEAD**-0.5, k, v)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """The Llama architecture, embeddings tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(N_VOCAB, D_MODEL)
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.norm = RMSNorm()
        freq = ROPE_BASE ** (-torch.arange(0, D_HEAD, 2).double() / D_HEAD)
        self.register_buffer("freq", freq.float(), persistent=False)
        self.prepare()

    @torch.no_grad()
    def prepare(self) -> None:
        """Random weights, plus a rough draft of the circuit that copying needs.

        Left to chance it takes most of a small budget to appear. Layer 0 gets heads that look 1, 2
        and 3 tokens back; one KV head of layers 1 to 3 gets queries and keys that compare those
        notes ("where did what I just read stand before?") in the slow RoPE channels, and values
        that write the token found there. Training is free to change all of it, and does.
        """
        for name, p in self.named_parameters():
            if p.ndim == 2:
                out = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(p, std=0.03 / math.sqrt(2 * N_LAYER) if out else 0.03)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.embed.weight[:, 0] = 0.5  # the same in every token: something to aim a fixed look at

        def frame(rows: int, cols: int = D_MODEL) -> Tensor:
            m = nn.init.orthogonal_(torch.empty(rows, cols))
            if cols == D_MODEL:
                m[:, 0] = 0.0
            return m

        first, fast, slow = self.blocks[0], 10, 38
        views = (frame(D_HEAD), frame(D_HEAD))
        first.v.weight.copy_(torch.cat(views))
        notes = frame(N_HEAD * D_HEAD).view(N_HEAD, D_HEAD, D_MODEL)
        first.o.weight.copy_(0.2 * torch.cat(tuple(notes)).T)
        first.q.weight.zero_()
        first.k.weight.zero_()
        for g in range(N_KV):
            first.k.weight[g * D_HEAD : g * D_HEAD + 2 * fast : 2, 0] = 1.4
        for h, back in enumerate((1, 2, 2, 3)):
            rows = first.q.weight[h * D_HEAD : h * D_HEAD + 2 * fast]
            rows[0::2, 0] = 1.4 * torch.cos(self.freq[:fast] * back)
            rows[1::2, 0] = -1.4 * torch.sin(self.freq[:fast] * back)
        for block in self.blocks[1:4]:
            j = [1.5 * frame(D_HEAD - slow, D_HEAD) for _ in range(3)]
            query = j[0] @ views[0] + j[1] @ notes[0] + j[2] @ notes[2]
            key = j[0] @ notes[0] + j[1] @ notes[1] + j[2] @ notes[3]
            for h in range(N_HEAD // N_KV):
                block.q.weight[h * D_HEAD + slow : (h + 1) * D_HEAD] = query
            block.k.weight[slow:D_HEAD] = key
            found = frame(D_HEAD)
            block.v.weight[:D_HEAD] = found
            for h in range(N_HEAD // N_KV):
                block.o.weight[:, h * D_HEAD : (h + 1) * D_HEAD] = 0.27 * found.T

    def hidden(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """tokens, pos: [batch, time] -> final normed states [batch, time, D_MODEL]."""
        angle = pos[:, :, None, None].float() * self.freq
        cos, sin = angle.cos(), angle.sin()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.embed.weight)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al., 2024); matrices only."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, ps in by_shape.items():
                moved = []
                for p in ps:
                    buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    moved.append(p.grad.lerp(buf, group["momentum"]))
                update = orthogonal(torch.stack(moved))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, u in zip(ps, update, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(u, alpha=-scale)


def orthogonal(g: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly. g: [n, rows, cols]."""
    wide = g.shape[1] <= g.shape[2]
    x = g if wide else g.mT
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.to(g.dtype) if wide else x.mT.to(g.dtype)


def read_book(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def make_tokenizer(texts: list[str], path: Path):
    """GPT-2's byte-level pre-tokenizer, so that llama.cpp's "gpt-2" splits text the same way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if path.exists():
        return Tokenizer.from_file(str(path))
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=N_VOCAB,
            special_tokens=[EOT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tok.save(str(path))
    return tok


class Data:
    """Token streams of the training books (one array) and of the held-out ones."""

    def __init__(self, folder: Path, out: Path) -> None:
        books = sorted(folder.glob("*.txt"))
        names = {b.name for b in books}
        missing = [n for n in HELD_OUT if n not in names]
        if missing:
            raise SystemExit(f"train.py: {folder} lacks the held-out book {missing[0]}")
        train = [b for b in books if b.name not in HELD_OUT + LEFT_OUT]
        self.tok = make_tokenizer([read_book(b) for b in train], out / "tokenizer.json")
        self.newline = self.tok.token_to_id("\u010a")  # byte-level BPE's name of \n
        cache = out / "tokens.npz"
        if not cache.exists():
            np.savez(
                cache,
                train=np.concatenate([self.encode(read_book(b)) for b in train]),
                held=np.concatenate([self.encode(read_book(folder / n)) for n in HELD_OUT[:2]]),
            )
        with np.load(cache) as z:
            self.train, self.held = z["train"], z["held"]

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tok.encode(text).ids, np.int64)

    def slice(self, rng: np.random.Generator, n: int, held: bool = False) -> np.ndarray:
        stream = self.held if held else self.train
        at = rng.integers(0, len(stream) - n)
        return stream[at : at + n]

    def noise(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens with a period: only what has been seen before can be predicted."""
        period = int(rng.integers(8, max(9, n // 2)))
        once = rng.integers(1, N_VOCAB, period)
        weight = np.ones(n, np.float32)
        weight[: period + 1] = 0.0
        return np.resize(once, n), weight

    def recall(
        self, rng: np.random.Generator, n: int, held: bool = False
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Prose, then passages of it from anywhere. Returns tokens, loss weights, prose length."""
        body = int(n * rng.uniform(0.4, 0.75))
        out = [self.slice(rng, body, held)]
        weight = [np.full(body, 0.5, np.float32)]
        left = n - body
        while left > 0:
            size = int(min(rng.integers(24, max(40, min(256, body // 2))), left))
            at = int(rng.integers(0, body - size))
            piece = out[0][at : at + size].copy()
            if rng.random() < 0.5:
                piece[:2] = self.newline  # an empty line, then from the third token on
            w = np.full(size, 3.0, np.float32)
            w[:4] = 0.0  # where the passage starts cannot be known
            out.append(piece)
            weight.append(w)
            left -= size
        return np.concatenate(out), np.concatenate(weight), body


def positions(rng: np.random.Generator, n: int, cut: int) -> np.ndarray:
    """Position ids with a jump at `cut`: short contexts that train long distances.

    Only the step between prose and recalled passages is stretched, so neighbours stay neighbours.
    """
    pos = np.arange(n)
    pos[cut:] += rng.integers(0, N_CTX - n + 1)
    return pos


def batch(data: Data, stage: Stage, seed: int, step: int, rank: int, ranks: int):
    """This worker's tokens [rows, length + 1], positions and target weights [rows, length]."""
    rng = np.random.default_rng((seed, step, rank))
    n = stage.length + 1
    rows = []
    for _ in range(max(1, stage.batch // stage.length // ranks)):
        kind = rng.random()
        if kind < stage.noise:
            tokens, weight = data.noise(rng, n)
            cut = int(rng.integers(1, n))
            # the jump must not part a token from the one it follows in every period
            pos = np.arange(n) + rng.integers(0, N_CTX - n + 1) * (rng.random() < 0.3)
        elif kind < stage.noise + stage.plain:
            tokens, weight = data.slice(rng, n), np.ones(n, np.float32)
            pos = np.arange(n)
        else:
            tokens, weight, cut = data.recall(rng, n)
            pos = positions(rng, n, cut) if rng.random() < 0.5 else np.arange(n)
        rows.append((tokens, pos, weight))
    tokens, pos, weight = (torch.from_numpy(np.stack(c)) for c in zip(*rows, strict=True))
    return tokens, pos[:, :-1], weight[:, 1:]


@torch.no_grad()
def copy_accuracy(model: Llama, data: Data, length: int, rank: int, ranks: int) -> float:
    """Share of held-out tokens predicted right after a 16-token cue.

    Each context is prose of `length` - 100 tokens, then 100 tokens from anywhere in it.
    """
    rng = np.random.default_rng((1, rank))
    hits = []
    for _ in range(max(1, 4 // ranks)):
        body = length - 100
        prose = data.slice(rng, body, held=True)
        at = int(rng.integers(0, body - 100))
        tokens = torch.from_numpy(np.concatenate([prose, prose[at : at + 100]]))[None]
        with torch.autocast("cpu", torch.bfloat16):
            h = model.hidden(tokens, torch.arange(length)[None])[:, body + 15 : -1]
            best = model.logits(h).argmax(-1)
        hits.append((best == tokens[:, body + 16 :]).float().mean())
    mean = torch.stack(hits).mean()
    if ranks > 1:
        dist.all_reduce(mean)
    return mean.item() / ranks


def loss_of(model: Llama, tokens: Tensor, pos: Tensor, weight: Tensor) -> Tensor:
    """Weighted cross-entropy; targets of weight 0 never reach the output layer."""
    with torch.autocast("cpu", torch.bfloat16):
        h = model.hidden(tokens[:, :-1], pos).flatten(0, 1)
        keep = weight.flatten().nonzero()[:, 0]
        logits = model.logits(h[keep])
    w = weight.flatten()[keep]
    each = F.cross_entropy(logits.float(), tokens[:, 1:].flatten()[keep], reduction="none")
    return (each * w).sum() / w.sum()


def plan(stages: tuple[Stage, ...]) -> list[Stage]:
    """The stage of every step."""
    return [s for s in stages for _ in range(s.tokens // s.batch)]


def rate(step: int, steps: list[Stage], seen: int, total: int) -> float:
    """Learning-rate factor: warm-up, plateau, linear decay by tokens."""
    tail = (total - seen) / (DECAY * total)
    return min((step + 1) / WARMUP, 1.0, max(0.03, tail))


def train(rank: int, args: argparse.Namespace) -> None:
    """One worker: its share of every batch, gradients averaged over the workers.

    Workers are whole processes of one thread each: on a busy machine threads that meet at every
    operator mostly wait for one another.
    """
    ranks = args.workers
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if ranks > 1:
        meet = f"file://{(args.out / 'meet').resolve()}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    data = Data(args.data, args.out)
    model = Llama()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optims = (
        Muon(matrices, args.lr_muon),
        torch.optim.AdamW(others, args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    )
    steps = [s for s in STAGES for _ in range(s.tokens // s.batch)]
    total = sum(s.batch for s in steps)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    count = sum(p.numel() for p in model.parameters())
    say(
        f"{count / 1e6:.2f} M parameters, {len(data.train) / 1e6:.2f} M tokens of text, "
        f"{len(steps)} steps, {total / 1e6:.1f} M tokens to train on"
    )
    start, seen, last = 0, 0, args.out / "last.pt"
    if last.exists():
        state = torch.load(last, weights_only=True)
        model.load_state_dict(state["model"])
        for o, s in zip(optims, state["optims"], strict=True):
            o.load_state_dict(s)
        start, seen = state["step"], state["seen"]
        say(f"going on from step {start}")
    clock, saved, mean, fresh = time.time(), time.time(), 0.0, 0
    for step in range(start, len(steps)):
        stage = steps[step]
        # warm-up, plateau, linear decay by tokens
        factor = min((step + 1) / WARMUP, 1.0, max(0.03, (total - seen) / (DECAY * total)))
        for o, lr in zip(optims, (args.lr_muon, args.lr), strict=True):
            o.param_groups[0]["lr"] = lr * factor
        loss = loss_of(model, *batch(data, stage, args.seed, step, rank, ranks))
        loss.backward()
        if ranks > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            sizes = [p.numel() for p in model.parameters()]
            for p, g in zip(model.parameters(), flat.split(sizes), strict=True):
                p.grad.copy_(g.view_as(p) / ranks)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optims:
            o.step()
            o.zero_grad(set_to_none=True)
        seen += stage.batch
        fresh += stage.batch
        mean += loss.item()
        end = step + 1
        if end % args.log_every == 0 or end == len(steps):
            near = copy_accuracy(model, data, max(256, stage.length), rank, ranks)
            far = copy_accuracy(model, data, 2048, rank, ranks)
            say(
                f"step {end}/{len(steps)}  {seen / 1e6:.2f} M  T {stage.length}  "
                f"loss {mean / (fresh / stage.batch):.3f}  "
                f"copy {near:.3f}  copy@2048 {far:.3f}  lr x{factor:.2f}  "
                f"{fresh / (time.time() - clock):.0f} tokens/s"
            )
            clock, mean, fresh = time.time(), 0.0, 0
        if rank == 0 and (time.time() - saved > 60 or end == len(steps)):
            part = last.with_suffix(".part")
            state = {"model": model.state_dict(), "optims": [o.state_dict() for o in optims]}
            torch.save(state | {"step": end, "seen": seen}, part)
            part.replace(last)
            saved = time.time()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", type=Path, required=True, help="folder of plain-text books")
    p.add_argument("--out", type=Path, default=Path("run"), help="checkpoint folder")
    p.add_argument("--gguf", type=Path, help="write the trained model here")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    p.add_argument("--lr", type=float, default=3e-3, help="AdamW: embeddings and norms")
    p.add_argument("--lr-muon", type=float, default=0.01, help="Muon: all other matrices")
    p.add_argument("--log-every", type=int, default=50, help="steps between progress lines")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Data(args.data, args.out)  # the tokenizer and the token cache, before the workers need them
    (args.out / "meet").unlink(missing_ok=True)
    if args.workers > 1:
        torch.multiprocessing.spawn(train, (args,), nprocs=args.workers)
    else:
        train(0, args)
    if args.gguf is not None:
        from export import export

        export(args.out, args.gguf)


if __name__ == "__main__":
    main()
