"""The load generator: what is sent to a server, when, and what came of it."""
