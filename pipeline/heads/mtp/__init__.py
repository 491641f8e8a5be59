"""Chained heads, one a step (multi-token prediction)."""
