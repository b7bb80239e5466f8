"""Experiments on this machine, and the page that shows them."""
