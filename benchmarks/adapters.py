"""What LoRA adapters cost: tokens per second with none, with one for half of the requests, and with one for all.

    python benchmarks/adapters.py [--model FOLDER] [--rank 16] [--requests 1 16] [--methods none ngram] [--rounds 3]

Random adapters of all linear layers are written to a temporary folder. Without ``--model``: the embedded target,
prompts of 64 tokens from its held-out text, 128 tokens generated; with one: random prompts, 24 tokens. Greedy, adaptive
control. Settings alternate within a round; medians over the rounds. To compare two versions, run them in turns, each
with its own source tree as PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftwise import LLM, LoRARequest, SamplingParams
from draftwise.bench.workloads import code_prompts
from draftwise.config.embedded import embedded_path

PROMPT = 64
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WHO = {"none": 0, "half": 2, "all": 1}
"""Every how many-th request has an adapter; 0: nobody has."""


def write_adapter(folder: Path, model: Path, rank: int) -> None:
    """An adapter as PEFT writes it, small enough not to change much."""
    random = torch.Generator().manual_seed(1)
    parts = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                module = name.removesuffix(".weight")
                if not module.endswith(MODULES):
                    continue
                outputs, inputs = file.get_slice(name).get_shape()
                base = f"base_model.model.{module}"
                parts[f"{base}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * 0.01
                parts[f"{base}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.01
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(parts, folder / "adapter_model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a folder without a tokenizer, or with one")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--methods", nargs="+", default=["none", "ngram"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options: dict[str, Any] = (
        {} if args.model is None else {"model": str(args.model), "skip_tokenizer_init": True}
    )
    tokens = 128 if args.model is None else 24
    most = max(args.requests)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), args.model or embedded_path("target"), args.rank)
        with LLM(
            enable_lora=True, max_lora_rank=args.rank, enable_prefix_caching=False, max_num_seqs=most,
            max_model_len=1024, **options,
        ) as llm:  # fmt: skip
            adapter = LoRARequest("random", 1, folder)
            if args.model is None:
                prompts = [list(prompt) for prompt in code_prompts(llm.get_tokenizer(), most, PROMPT)]
            else:
                prompts = np.random.default_rng(0).integers(10, 1000, (most, PROMPT)).tolist()
            found: dict[tuple[str, int, str], list[float]] = {}
            for turn in range(args.rounds + 1):
                for method in args.methods:
                    params = SamplingParams(
                        temperature=0, max_tokens=tokens, ignore_eos=True, speculation={"method": method}
                    )
                    for requests in args.requests:
                        for who, every in WHO.items():
                            if who == "half" and requests == 1:
                                continue
                            asked = [adapter if every and i % every == 0 else None for i in range(requests)]
                            given = [{"prompt_token_ids": prompt} for prompt in prompts[:requests]]
                            start = time.perf_counter()
                            llm.generate(given, params, lora_request=asked, use_tqdm=False)
                            rate = requests * tokens / (time.perf_counter() - start)
                            if turn:  # the first warms up
                                found.setdefault((method, requests, who), []).append(rate)
    for (method, requests, who), rates in found.items():
        bare = statistics.median(found[method, requests, "none"])
        rate = statistics.median(rates)
        print(
            f"{method:>8} {requests:>4} requests, adapters: {who:<5} {rate:8.1f} tokens/s  {rate / bare:5.2f}"
        )


if __name__ == "__main__":
    main()
