"""What is asked of whom: the engines that can be compared, and the cells of each workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_ROWS = (1, 4, 8)
CONTEXTS = (64, 2048)
PREFILL = (512,)
REPEAT = 3  # passes per cell and round


@dataclass(frozen=True, slots=True)
class Peer:
    """``modules``: what its environment must have. ``alone``: each method needs a process of its own."""

    name: str
    adapter: str
    modules: tuple[str, ...]
    methods: tuple[str, ...]
    formats: tuple[str, ...]
    alone: bool = False
    batches: bool = False


OURS = "draftwise"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            OURS,
            "adapter_draftwise.py",
            ("draftwise",),
            ("plain", "ngram", "draft_model", "suffix", "eagle3", "medusa", "mtp"),
            ("bf16", "int8", "int8-weight-only", "int4", "int4-weight-only"),
            batches=True,
        ),
        Peer(
            "vllm",
            "adapter_vllm.py",
            ("vllm",),
            ("plain", "ngram", "draft_model", "suffix"),
            ("bf16",),
            alone=True,
            batches=True,
        ),
        Peer(
            "openvino",
            "adapter_openvino.py",
            ("openvino", "openvino_genai"),
            ("plain", "ngram", "draft_model"),
            ("bf16", "int8", "int4"),
        ),
        Peer("llamacpp", "adapter_llamacpp.py", ("llama_cpp",), ("plain", "ngram"), ("bf16", "int8", "int4")),
        Peer(
            "transformers",
            "adapter_transformers.py",
            ("transformers",),
            ("plain", "ngram", "draft_model"),
            ("bf16",),
        ),
    )
}


def family(format: str) -> str:
    """The weight format that a variant belongs to: "int8-weight-only" -> "int8"."""
    return format.partition("-")[0]


def model_path(work: Path, peer: str, name: str, format: str = "bf16") -> Path:
    """Where `prepare.py` leaves a model for an engine. ``name``: "llama-1b", "target" or "draft"."""
    if peer == "openvino":
        return work / "openvino" / f"{name}-{family(format)}"
    if peer == "llamacpp":
        kind = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}[family(format)]
        return work / "gguf" / f"{name}-{kind}.gguf"
    return work / name


@dataclass(frozen=True, slots=True)
class Cell:
    """A question and the name of its column. ``tokens``: tokens of its answer, for rates; None: its answer is times."""

    name: str
    question: dict[str, Any]
    tokens: int | None = None

    @property
    def batched(self) -> bool:
        """Whether it asks for several requests at once."""
        return self.tokens is not None and self.question["at_once"] and len(self.question["prompts"]) > 1


def step_cells(
    contexts: Sequence[int] = CONTEXTS, rows: Sequence[int] = STEP_ROWS, prefill: Sequence[int] = PREFILL
) -> list[Cell]:
    """Passes at each context, all row counts, then prompts."""
    cells = [
        Cell(f"{n} @ {context}", {"do": "step", "context": context, "rows": n, "repeat": REPEAT})
        for context in contexts
        for n in rows
    ]
    return cells + [Cell(f"prefill {tokens}", {"do": "prefill", "tokens": tokens}) for tokens in prefill]


def generate_cell(
    method: str,
    temperature: float,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    at_once: bool = True,
) -> Cell:
    """Generation for these prompts, ``at_once`` or one after the other."""
    name = f"{method}, T={temperature:g}" + (
        f", {len(prompts)} at once" if at_once and len(prompts) > 1 else ""
    )
    question = {
        "do": "generate",
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": tokens,
        "method": method,
        "temperature": temperature,
        "at_once": at_once,
    }
    return Cell(name, question, tokens * len(prompts))
