"""`make figures`: draw every figure again from the records."""

from __future__ import annotations

import end_to_end
import intensity
import microbenchmark
import plot
import recall_per_byte
import roofline
import time_in_attention

FIGURES = (
    end_to_end,
    microbenchmark,
    time_in_attention,
    roofline,
    intensity,
    recall_per_byte,
)

if __name__ == "__main__":
    plot.main(*FIGURES)
