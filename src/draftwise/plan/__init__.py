"""Times of steps on a device, models of traffic, and the number of replicas that it needs."""
