"""Targets evaluated by llama.cpp, through the low-level interface of llama-cpp-python."""
