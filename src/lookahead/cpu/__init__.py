"""The compiled path on CPUs: this library's own forward pass.

A model comes from transformers (``hf.module_families`` maps the classes and explains how to add one) or from a
GGUF file, whose weights stay packed (``packed_model``). ``CpuTarget`` evaluates token trees on the compiled model.
Rows are batch-invariant: a row is bit-identical in any tree. The user's model is never modified. See docs/cpu.md.
"""
