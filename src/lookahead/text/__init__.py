"""Text and tokens: tokenizers, prompts, and tokens back to text."""
