"""LoRA adapters: low-rank additions to linear layers, another one for each request."""
