"""Targets evaluated by llama.cpp, through llama-cpp-python's low-level interface."""
