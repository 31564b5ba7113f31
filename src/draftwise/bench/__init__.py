"""Measurements: latency, throughput and acceptance, through the public interface alone.

Times drift by tens of percent on shared machines. Everything that is compared is therefore measured alternately in
one run, on one engine with all drafters loaded, and compared by medians.
"""
