"""Models: reading GGUF headers (`gguf_file`), cards (`cards`), random weights (`synth`)."""
