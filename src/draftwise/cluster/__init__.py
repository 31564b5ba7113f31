"""Ranks in processes of their own: how they are started, spoken to, watched and ended."""
