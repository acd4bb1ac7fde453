"""StreamingLLM (Xiao et al., arXiv 2309.17453): 4 attention sinks and a window of the newest.

Left out: keys rotated anew by their place in the cache. It keeps distances within those a model was
trained on; here no text is longer than that, and keys keep their positions, as in every other
method that is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyorch.policies.lm_infinite import LMInfinite


@dataclass(frozen=True)
class StreamingLLM(LMInfinite):
    sinks: int = 4
    name = "streaming-llm"
