"""Decide which allocation is trained next, run it, and say what was found."""
