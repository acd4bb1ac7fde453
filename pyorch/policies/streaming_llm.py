"""StreamingLLM (Xiao et al., arXiv 2309.17453): 4 attention sinks and a window of the newest.

Keys are not rotated anew by their place in the cache. That would keep distances within those of
training; here no text is longer, and keys keep their positions, as in every other method that is
compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.policies.lm_infinite import LMInfinite


@dataclass(frozen=True)
class StreamingLLM(LMInfinite):
    sinks: int = 4
    name = "streaming-llm"
