"""Quantised weights: formats, rounding to them, and their plain-torch reference."""
