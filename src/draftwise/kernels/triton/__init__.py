"""Kernels for GPUs, written in Triton; see `ops.TritonOps`. Needs the package ``triton`` (extra ``gpu``)."""
