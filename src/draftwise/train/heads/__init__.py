"""Training of draft heads: the heads as plain torch modules, their losses, data, the loop, and the export."""
