"""What steps take on a device, what traffic looks like, and how many replicas it needs."""
