"""Families x formats of weights x one head: what is kept as codes, what becomes floats; the table in docs/models.md.

    python -m tests.parity.formats

writes the table; behind it, names of columns: these alone are tried, and the others stay as they are on the page. The
same numbers stand on both sides: a checkpoint in the format, and the floats that it stands for, through Transformers.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from draftwise import LLM, SamplingParams
from draftwise.errors import ModelLoadError
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from tests.fakes.architectures import save, small
from tests.fakes.gguf import convert
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.fakes.quantized import Pair, write_pair, write_rounded
from tests.unit.test_gguf import BASE, meant
from tests.unit.test_gguf import FAMILIES as FAMILIES_OF_FILES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"
CPU = torch.device("cpu")

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi",
    "phi3", "gpt_oss", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "mpt", "stablelm", "starcoder2", "cohere",
    "cohere2", "granite", "granitemoe", "olmo", "olmo2", "olmo3", "olmoe", "glm", "glm4", "glm4_moe", "deepseek_v2",
    "deepseek_v3", "smollm3", "exaone4", "internlm3", "nemotron", "seed_oss", "ernie4_5",
)  # fmt: skip
"""Values of ``model_type``, as Transformers has them."""
CHECKPOINTS = {
    "AWQ": "awq", "GPTQ": "gptq", "GPTQ act-order": "gptq desc_act", "GPTQ 8": "gptq 8 bits",
    "w4a16": "w4a16 with zeros", "w8a16": "w8a16", "w8a8": "w8a8", "fp8 blocks": "fp8 blocks", "fp8": "fp8",
    "fp8 tensor": "fp8 tensor", "nf4": "nf4 nested", "bnb 8": "bnb 8",
    "NVFP4": "modelopt nvfp4", "MXFP4": "mxfp4",
}  # fmt: skip
"""Columns of the table, and their names in `CASES`."""
ROUNDED = ("int8", "int4")
GGUF = "GGUF Q4_0"
COLUMNS = (*ROUNDED, *CHECKPOINTS, GGUF, "head")
GGUF_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "mistral": ("llama", {"sliding_window": None}, {}),
    **{kind: (name, settings, metadata) for name, (kind, settings, metadata) in FAMILIES_OF_FILES.items()},
}
"""Values of ``model_type`` -> the family's name in a file, settings, fields of the file."""
EXACT = 1e-4
"""Of logits in float32, relative to the largest where that is over 1."""
NEAR = 0.25
"""Mean difference over the deviation of logits in bfloat16, with codes and rows rounded to eight bits."""
_TOKENS = [(5 + 11 * i) % 240 + 5 for i in range(24)]


@dataclass(frozen=True)
class Outcome:
    """``kept``: "codes" or "floats", or "refused"; ``words``: why."""

    kind: str
    form: str
    kept: str
    way: str = ""
    words: str = ""


def logits_of(model: DecoderModel, tokens: list[int]) -> Tensor:
    """[T, V] float32, in two chunks."""
    kv = KVStorage(model.kv_layout(), 8, 8, model.dtype, CPU, **_states(model))
    table = torch.arange(8, dtype=torch.int32).numpy()
    found = []
    with torch.inference_mode():
        for start, end in ((0, 9), (9, len(tokens))):
            rows = build_step_input([RowInput(tokens[start:end], start, table)], 8, CPU)
            found.append(model.forward_logits(rows, kv)[1].clone())
    return torch.cat(found)


def _states(model: DecoderModel) -> dict[str, Any]:
    assert model.state_spec() is None, "no family here keeps a state"
    return {}


def way_of(model: DecoderModel) -> str:
    inner = getattr(model, "inner", model)
    if isinstance(inner, GeneralDecoder):
        return "Transformers' code"
    return "put together" if isinstance(inner, AssembledDecoder) else "own code"


def checkpoint(kind: str, form: str, folder: Path) -> Outcome:
    """A quantised checkpoint: the numbers that it stands for in float32, and on native kernels in codes.

    Raises:
        AssertionError: it is served, and not equal.
    """
    pair = write_pair(folder, kind, CHECKPOINTS[form])
    wanted = pair.reference(_TOKENS)
    try:
        exact = load_model(pair.quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))
    except ModelLoadError as error:
        return Outcome(kind, form, "refused", words=str(error).removeprefix(f"{pair.quantized}: "))
    difference = float((logits_of(exact, _TOKENS) - wanted).abs().max())
    assert difference <= EXACT * max(1.0, float(wanted.abs().max())), (kind, form, difference)
    native = load_model(pair.quantized, dtype=torch.bfloat16, device=CPU)
    _assert_near(native, wanted, kind, form)
    return Outcome(kind, form, _kept(kind, pair, native), way_of(native))


def gguf(kind: str, folder: Path) -> Outcome:
    """A GGUF file in Q4_0. Raises as `checkpoint`."""
    if kind not in GGUF_FAMILIES:
        return Outcome(kind, GGUF, "refused", words="no GGUF files of this family are read")
    name, settings, metadata = GGUF_FAMILIES[kind]
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(kind, **(BASE | {"vocab_size": 256} | settings))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    more = {f"{name}.{field}": value for field, value in metadata.items()}
    weights = convert(folder / "model", folder / "m.gguf", name, "Q4_0", more)
    plain = meant(folder / "model", weights, folder / "plain")
    architecture = json.loads((plain / "config.json").read_text())["architectures"][0]
    count = sum(w.numel() for n, w in weights.items() if w.ndim == 2 and ".layers." in n)
    pair = Pair(architecture, folder / "m.gguf", plain, count)
    wanted = pair.reference(_TOKENS)
    exact = load_model(folder / "m.gguf", dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))
    difference = float((logits_of(exact, _TOKENS) - wanted).abs().max())
    assert difference <= EXACT * max(1.0, float(wanted.abs().max())), (kind, GGUF, difference)
    native = load_model(folder / "m.gguf", dtype=torch.bfloat16, device=CPU)
    _assert_near(native, wanted, kind, GGUF)
    saved = load_model(plain, dtype=torch.bfloat16, device=CPU).weight_bytes() - native.weight_bytes()
    return Outcome(kind, GGUF, "codes" if saved > 0.25 * 2 * count else "floats", way_of(native))


def _kept(kind: str, pair: Pair, model: DecoderModel) -> str:
    """By the bytes that are saved of the two of each number."""
    saved = _float_bytes(kind, pair.plain) - model.weight_bytes()
    return "codes" if saved > 0.25 * 2 * pair.count else "floats"


_known: dict[str, int] = {}  # of `_float_bytes`


def _float_bytes(kind: str, folder: Path) -> int:
    """Of the weights as floats: the same whatever the numbers are."""
    if kind not in _known:
        _known[kind] = load_model(folder, dtype=torch.bfloat16, device=CPU).weight_bytes()
    return _known[kind]


def rounded(kind: str, scheme: str, folder: Path) -> Outcome:
    """A float checkpoint, rounded as it is loaded. Raises as `checkpoint`."""
    pair = write_rounded(folder, kind, scheme)
    try:
        model = load_model(pair.quantized, dtype=torch.bfloat16, device=CPU, quantization=scheme)
    except ModelLoadError as error:
        return Outcome(kind, scheme, "refused", words=str(error).removeprefix(f"{pair.quantized}: "))
    _assert_near(model, pair.reference(_TOKENS), kind, scheme)
    return Outcome(kind, scheme, _kept(kind, pair, model), way_of(model))


def _assert_near(model: DecoderModel, wanted: Tensor, kind: str, form: str) -> None:
    off = (logits_of(model, _TOKENS) - wanted).abs().mean(1) / wanted.std()
    # most rows: that of an expert chosen by a hair may be another expert's
    assert float(off.median()) <= NEAR, (kind, form, off)


def drafted(kind: str, folder: Path) -> Outcome:
    """An EAGLE-3 head that borrows embedding or output layer: greedy text is that without it.

    Raises:
        AssertionError: it is not, or nothing was drafted.
    """
    made = small(kind)
    save(made, folder / "model")
    shape = HeadShape("eagle", 64, 64, 256, own_head=False)
    head = save_head(folder / "head", shape, random_weights(shape, seed=5))
    entry = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    prompts: list[Any] = [{"prompt_token_ids": [7 * i + j for j in range(3, 12 + 4 * i)]} for i in range(3)]
    texts, drafts = [], 0
    with LLM(
        str(folder / "model"), device="cpu", dtype="float32", skip_tokenizer_init=True, num_kv_blocks=40,
        speculative_config=entry, speculation_control="static",
    ) as llm:  # fmt: skip
        for speculation in ({}, {"method": "none"}):
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, speculation=speculation)
            found = llm.generate(prompts, params, use_tqdm=False)
            texts.append([tuple(output.outputs[0].token_ids) for output in found])
            drafts += sum(output.metrics.speculation.num_draft_tokens for output in found)
    assert texts[0] == texts[1] and drafts > 20, (kind, drafts)
    return Outcome(kind, "head", "drafts")


_MARKS = {"codes": "c", "floats": "f", "drafts": "yes", "refused": "-"}


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a line per way and set of answers, with the families that give them."""
    kinds = list(dict.fromkeys(o.kind for o in outcomes))
    cells = {(o.kind, o.form): o for o in outcomes}
    ways = {o.kind: o.way for o in outcomes if o.way}
    lines: dict[tuple[str, ...], list[str]] = {}
    for kind in kinds:
        answers = tuple(_MARKS[cells[kind, c].kept] for c in COLUMNS)
        lines.setdefault((ways.get(kind, ""), *answers), []).append(kind)
    text = [f"| families | runs on | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    text += [f"| {', '.join(found)} | {' | '.join(key)} |" for key, found in lines.items()]
    refused: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        if o.kept == "refused" and o.words:
            refused.setdefault((o.form, o.words), []).append(o.kind)
    notes = [f"- {form}, {', '.join(kinds)}: {words}" for (form, words), kinds in refused.items()]
    return "\n".join([*text, "", *notes]).rstrip() + "\n"


def read_table(text: str) -> list[Outcome]:
    """What `table` wrote; refusals without their words."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    kept = {mark: name for name, mark in _MARKS.items()}
    return [
        Outcome(kind, column, kept[mark], row[1])
        for row in rows[2:]
        for kind in row[0].split(", ")
        for column, mark in zip(rows[0][2:], row[2:], strict=True)
    ]


def tried(kind: str, form: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if form == "head":
            return drafted(kind, place)
        if form in ROUNDED:
            return rounded(kind, form, place)
        return gguf(kind, place) if form == GGUF else checkpoint(kind, form, place)


def main(asked: list[str]) -> None:
    if not set(asked) <= set(COLUMNS):
        raise SystemExit(f"columns are {', '.join(COLUMNS)}")
    logging.disable(logging.WARNING)
    before, rest = PAGE.read_text().split(BEGIN)
    known = {(o.kind, o.form): o for o in read_table(rest.split(END)[0])} if asked else {}
    outcomes = []
    for kind in FAMILIES:
        for form in COLUMNS:
            found = tried(kind, form) if not asked or form in asked else known[kind, form]
            outcomes.append(found)
            print(
                f"{kind:14} {form:16} {found.kept:8} {found.way:20} {found.words[:120]}",
                file=sys.stderr,
                flush=True,
            )
    PAGE.write_text(before + BEGIN + "\n" + table(outcomes) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
