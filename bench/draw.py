"""`make figures`: draw every figure again from the records; with NAMEs, these."""

from __future__ import annotations

import ablations
import attention_sparsity
import budgets
import end_to_end
import intensity
import microbenchmark
import plot
import query_tails
import recall_per_byte
import repetition
import roofline
import time_in_attention
import topk_agreement

FIGURES = (
    end_to_end,
    microbenchmark,
    time_in_attention,
    roofline,
    intensity,
    recall_per_byte,
    budgets,
    attention_sparsity,
    query_tails,
    topk_agreement,
    ablations,
    repetition,
)

if __name__ == "__main__":
    plot.main(*FIGURES)
