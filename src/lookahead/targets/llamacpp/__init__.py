"""llama.cpp as the engine that evaluates the rows, through the low-level interface of llama-cpp-python."""
