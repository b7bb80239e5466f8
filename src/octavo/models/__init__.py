"""One file per family: a configuration becomes a program."""
