"""Learning before the first request: a model writes text by itself, from which drafters learn."""
