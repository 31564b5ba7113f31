"""Drafts of heads on the target's hidden states: EAGLE, EAGLE-3, MTP layers, Medusa."""
