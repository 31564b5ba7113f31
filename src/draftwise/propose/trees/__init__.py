"""Draft trees: how they grow, and how the drafts of many requests are expanded together."""
