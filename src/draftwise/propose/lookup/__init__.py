"""Drafts that are looked up: in the request itself, in what was written before."""
