"""Everything that runs an engine to learn something about it."""
