"""Reading GGUF files: what `modelworker import-gguf` is made of."""
