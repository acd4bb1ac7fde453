"""Models: GGUF headers (`gguf_file`), the geometry of attention (`geometry`), cards (`cards`), the
hub (`pull`), conversion (`convert`), quantisation (`quantize`), and random models (`synth`)."""
