"""One GPU, measured in one call: kernels against torch, steps against its memory's bandwidth, drafting and whole
engines against plain decoding, Transformers as baseline. Weights are random and made on the device; nothing is
downloaded.

`command` runs every part in a process of its own: one that fails, hangs or takes the device down with it is reported,
and the others go on.
"""
