"""Where candidates come from: suffix matches, the logit cache, and the window, which explores for it.

The fourth source, what the last step answered at the same position, is ``Sources.answers`` itself.
"""
