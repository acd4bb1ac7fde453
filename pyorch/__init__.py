"""Sparse attention decode (SparQ, top-k) for llama.cpp. The command is `sparq-cpp`."""

__version__ = "0.1.0"
