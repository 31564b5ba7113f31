"""Passes that are captured once, as CUDA graphs, and replayed: the target's step, and the drafters' whole loops."""
