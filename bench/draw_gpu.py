"""The figures that need records from a CUDA device (`make bench-gpu`)."""

from __future__ import annotations

import gpu_attention
import gpu_end_to_end
import plot

if __name__ == "__main__":
    plot.main(gpu_attention, gpu_end_to_end)
