"""Models: GGUF headers (`gguf_file`), cards (`cards`), the hub (`pull`), random ones (`synth`)."""
