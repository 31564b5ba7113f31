"""Steps that stay on the device: decoding requests have seats there, and the host reads their results a step late."""
