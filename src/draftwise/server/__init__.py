"""The OpenAI-compatible HTTP server over `AsyncLLM`. Needs the extra ``serve``."""
