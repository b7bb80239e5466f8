"""Networks as data: the operation set and programs."""
