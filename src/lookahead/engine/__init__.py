"""Around the engine (``core.loop.Engine``): prompts to token ids, options to processors, tokens to text.

``admission`` completes a request for its model, ``prefix_cache`` keeps finished sequences.
"""
