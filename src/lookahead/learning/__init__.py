"""Text that a model writes by itself, and what drafters learn from it before their first request."""
