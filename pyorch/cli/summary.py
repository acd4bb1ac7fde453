"""The speed and attention of a run, as reported after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyorch.attention.spec import AttentionSpec
from pyorch.text import human_bytes

if TYPE_CHECKING:
    from pyorch.engine import AttentionInfo, Session, Timings


@dataclass(frozen=True)
class Summary:
    """A summary since the counters were reset; without `info`, attention is llama.cpp's."""

    timings: Timings
    info: AttentionInfo | None

    def json(self) -> dict[str, object]:
        """The values that --json prints."""
        t, info = self.timings, self.info
        out: dict[str, object] = {
            "prefill_tokens": t.prefill_tokens,
            "prefill_s": round(t.prefill_s, 4),
            "decode_tokens": len(t.decode_s),
            "decode_s": round(sum(t.decode_s), 4),
            "decode_tokens_per_s": round(t.decode_rate, 2),
            "attention": dict(info.raw) if info else None,
        }
        if info:
            read, dense = info.bytes_per_token
            out["attention_bytes_per_token"] = read
            out["attention_bytes_per_token_dense"] = dense
            out["share_sparse"] = round(info.sparse_share, 4)
        return out

    def line(self) -> str:
        """The summary in one line for people."""
        t, info = self.timings, self.info
        parts = [f"prefill {t.prefill_tokens} tokens in {t.prefill_s:.2f} s"]
        if not t.decode_s:
            return parts[0]
        parts.append(f"decode {t.decode_rate:.1f} tokens/s")
        if info and info.sparse_share:
            read, dense = info.bytes_per_token
            n, of = info.layers_sparse, len(info.layers)
            # nobody counts what layers that are left to llama.cpp read, such as those with a window
            what = f"attention of {n} of {of} layers" if n < of else "attention"
            parts.append(f"{what} {human_bytes(read)}/token of {human_bytes(dense)}")
            parts.append(f"{100 * info.sparse_share:.1f} % of calls sparse")
        elif info:
            parts.append("attention exact throughout")
        return ", ".join(parts)


def devices(info: AttentionInfo) -> list[str]:
    """A line for each device, if there are several: RPC0 is the first worker of --rpc."""
    devices = sorted(info.raw["devices"], key=lambda x: str(x["name"]))
    return [
        f"{x['name']}: {x['calls_sparse']} sparse calls, {human_bytes(x['bytes_read'])} read, "
        f"{human_bytes(x['shadow_bytes'])} of transposed K"
        for x in devices
        if len(devices) > 1
    ]


def summary_of(session: Session) -> Summary:
    """The summary of a session as it is now."""
    from pyorch import engine

    info = engine.info(session)
    return Summary(session.timings, info if info.method != "off" else None)


def why_dense(spec: AttentionSpec | None, info: AttentionInfo) -> str:
    """A note if sparse attention was requested but llama.cpp serves a layer, or every token so far
    was exact; otherwise ""."""
    if spec is None or not spec.sparse:
        return ""
    if info.dense_reasons:
        n = len(info.layers) - info.layers_sparse
        which = f"{n} of {len(info.layers)} layers are" if info.layers_sparse else "attention is"
        return f"note: {which} dense: {'; '.join(info.dense_reasons)}"
    if info.counter("calls_sparse") or not info.counter("steps"):
        return ""
    what = f"up to min_ctx {spec.min_ctx} positions, or k covers them all"
    return f"note: attention was exact throughout: {what}"
