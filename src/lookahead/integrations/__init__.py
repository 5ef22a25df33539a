"""Adapters for other software: transformers, vLLM, llama.cpp, llm and Ray Serve."""
