"""What model files say: GGUF headers and tensors, tokenizers, the parts of each model family."""
