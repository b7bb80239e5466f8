"""Octavo and its peers side by side: the same work, in one run, engine after engine.

`python -m benchmarks.peers` is what `make bench` runs. Works are in `work`, engines in the modules
that carry their names; the rest measures, remembers and prints.
"""
