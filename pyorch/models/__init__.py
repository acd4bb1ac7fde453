"""Models: GGUF headers (`gguf_file`), what they say of attention (`geometry`), cards (`cards`), the
hub (`pull`), converted (`convert`), quantised (`quantize`) and random ones (`synth`)."""
