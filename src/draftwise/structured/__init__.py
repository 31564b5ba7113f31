"""Structured output: JSON schemas, regular expressions, choices and grammars (docs/algorithms/structured-output.md).

`sampling.structured` says what a user asks for; ``base`` is the contract of a grammar engine and
``llguidance`` the one behind it; ``cursor`` walks a request's grammar along its draft tree.
"""
