"""Decisions: which block, and who advances. Pure Python."""
