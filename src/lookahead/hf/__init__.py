"""The engine of transformers models, and the function for ``model.generate(custom_generate=lookahead.generate)``."""
