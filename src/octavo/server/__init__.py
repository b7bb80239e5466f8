"""The face: OpenAI-compatible routes, and what they report."""
