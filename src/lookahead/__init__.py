"""Exact, training-free, draft-free acceleration of LLM decoding (lookahead decoding)."""

__version__ = "0.1.0"
