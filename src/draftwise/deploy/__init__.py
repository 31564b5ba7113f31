"""The server on Ray Serve: engines as replicas of a deployment, behind fronts that know which has which prefix."""
