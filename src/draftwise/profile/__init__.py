"""Measures what a model's steps take on this machine, and what its drafters get accepted, apart from each other."""
