"""GGUF files: their parts, sizes, settings and families."""
