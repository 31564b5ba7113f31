"""Drafts that are looked up, in the request itself or in past outputs."""
