"""Adapters for other software: transformers, vLLM, llama.cpp and llm."""
