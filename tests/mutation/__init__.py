"""Mutation testing: which single changes of a module does no test see? Run by ``scripts/mutate``."""
