"""Choosing tokens: noise, the chooser and logits processors."""
