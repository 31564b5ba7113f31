"""Engines without a device: the real scheduler, cache and controller on a clock that jumps from step to step."""
