"""Drafts of whole models: a small one, or the target's own first layers."""
