"""Trained and retrieval-based drafters in their smallest form, to compare with this library's own at equal rows.

They only propose. This library's decoding loop verifies, so the output equals plain decoding, as with any drafter.
"""
