"""The engine: requests in, tokens and text out, for any number of sequences on one model.

``engine.Engine`` decodes requests together; ``text.TextStream`` turns their tokens into text that is safe to show.
Importing this package imports none of its modules.
"""
