"""Trained and retrieving drafters, each in its smallest form, beside this library's own at equal rows.

They propose; this library's loop verifies, so their output is that of plain decoding, as for any drafter.
"""
