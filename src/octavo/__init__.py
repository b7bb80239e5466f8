"""Octavo: an LLM serving engine for the machine you have."""
