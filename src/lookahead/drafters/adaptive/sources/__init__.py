"""Where candidates come from: suffix matches, the logit cache, and the window, which explores for it."""
