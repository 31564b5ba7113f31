"""Compiles what the benchmark for GPUs and an engine launch, for a GPU of compute capability 9.0; needs none. Run in a
process of its own, without TRITON_INTERPRET. Prints a line per kind of launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from draftwise.bench.gpu import command, setting
from tests.fakes import seats
from tests.fakes.fake_cuda import fake_cuda
from tests.fakes.fake_cuda_triton import Launch, fake_launches

SMALL = dataclasses.replace(
    setting.LLAMA_8B,
    hidden=1024,
    inner=2048,
    layers=4,
    heads=8,
    kv_heads=2,
    vocab=16384,
    draft_vocab=8192,
    context=600,
    batches=((1, 60), (3, 40)),
    steps=2,
    copy_bytes=1 << 16,
    prefill=128,
    repeats=1,
)
"""A Llama-3.1-8B's heads and tiles, and layers whose inputs are summed in parts."""


def main() -> None:
    torch.set_num_threads(1)
    setting.TINY = SMALL

    def told(launch: Launch, binary: Any) -> None:
        kinds = " ".join(f"{name}={kind}" for name, kind in launch.arguments)
        print(launch.kernel, f"{binary.metadata.shared} bytes shared", kinds, flush=True)

    with fake_cuda() as device, fake_launches(device, "compile") as launches:
        launches.compiled = told
        launches.effects |= seats.EFFECTS
        for part in ("steps", "kernels", "drafting", "engines", "attention"):
            report = command.run_part(part, "cuda", True)
            assert report.error is None, f"{part}: {report.error}"


if __name__ == "__main__":
    main()
