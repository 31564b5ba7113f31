"""GGUF files: weights, configuration and tokenizer of a model in one file, as llama.cpp has them."""
