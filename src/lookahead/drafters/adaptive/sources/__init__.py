"""The sources of candidates: suffix matches, the logit cache, the window that feeds it, the base table, the head."""
