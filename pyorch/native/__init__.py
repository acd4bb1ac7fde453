"""The patched llama.cpp: get the pinned source, patch, build, load."""
