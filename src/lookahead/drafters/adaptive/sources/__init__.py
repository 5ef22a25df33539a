"""The sources of candidates: suffix matches, the logit cache, the base table, the head."""
