"""Model files: GGUF headers and tensors, tokenizers, and the parts of each model family."""
