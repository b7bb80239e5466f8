"""Where a plan becomes arrays and a program is run."""
