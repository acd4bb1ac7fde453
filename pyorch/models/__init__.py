"""Model files: reading GGUF headers (`gguf_file`)."""
