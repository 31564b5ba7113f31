"""Training: the embedded demo models, hidden-state extraction and draft heads."""
