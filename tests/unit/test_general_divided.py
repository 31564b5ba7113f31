"""Models that are put together from a trace, on several ranks: the logits of the whole, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.fakes.architectures import save, small
from tests.fakes.gguf import convert
from tests.fakes.lora import save_adapter
from tests.fakes.quantized import write_pair
from tests.fakes.ranks import on_ranks
from tests.native import native_or_skip
from tests.unit.test_split import loaded, logits_of
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.ranks import Ranks
from draftwise.models import checkpoint
from draftwise.models.base import DecoderModel
from draftwise.models.cuts import Cut
from draftwise.models.general import stored
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.loader import check_divided
from draftwise.models.lora.decoder import AdaptedDecoder
from draftwise.models.lora.peft import read_adapter
from draftwise.models.recorded import RecordedDecoder

LAYERS = {"num_hidden_layers": 2}
"""Every rank takes a trace of the model: a layer less is a third of the time."""


def kept(model: DecoderModel) -> int:
    """Numbers of a token in the cache."""
    return sum(layer.elements_per_token for layer in model.kv_layout())


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("gpt_neox", 2),  # q, k and v in one layer, biases, two norms of one hidden state
        ("gpt2", 2),  # an MLP without a gate
        ("granite", 4),  # factors; fewer K/V heads than ranks
        ("olmo2", 2),  # norms over all heads: attention stays whole
        pytest.param("stablelm", 2, marks=pytest.mark.slow),
        pytest.param("smollm3", 4, marks=pytest.mark.slow),
        pytest.param("starcoder2", 2, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_whole(tmp_path: Path, kind: str, size: int) -> None:
    save(small(kind, **LAYERS), tmp_path / kind)
    whole = loaded(tmp_path / kind)
    expected = logits_of(whole)

    def work(ranks: Ranks) -> tuple[Tensor, int, int, int]:
        model = loaded(tmp_path / kind, ranks)
        inner = model.inner if isinstance(model, RecordedDecoder) else model
        assert isinstance(inner, AssembledDecoder)
        table = model.shared_weights().embedding
        assert list(ranks.tables) == [table.data_ptr()], "the made-up one is forgotten"
        return logits_of(model), model.weight_bytes(), kept(model), len(table)

    check_divided(tmp_path / kind, size)
    answers = on_ranks(size, work)
    assert sum(answer[3] for answer in answers) == whole.config.vocab_size, "each has some tokens"
    for logits, *_ in answers:
        assert torch.equal(logits, answers[0][0]), "all ranks have the same bits"
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    assert max(answer[1] for answer in answers) < 0.9 * whole.weight_bytes()
    assert max(answer[2] for answer in answers) < kept(whole) or kind == "olmo2"


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        pytest.param("F32", 96, marks=pytest.mark.slow),
        ("Q4_0", 128),
        ("Q4_0", 96),
        pytest.param("Q8_0", 128, marks=pytest.mark.slow),
    ],
)
def test_gguf_files_that_are_put_together_are_divided(tmp_path: Path, kind: str, width: int) -> None:
    """By whole blocks of 32 inputs: an MLP of three blocks stays whole on both ranks."""
    sizes = {
        "intermediate_size": width,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    save(small("starcoder2", sliding_window=None, **sizes, **LAYERS), tmp_path / "model")
    more = {"starcoder2.rope.freq_base": 10000.0}
    convert(tmp_path / "model", tmp_path / "m.gguf", "starcoder2", kind, more)
    whole = loaded(tmp_path / "m.gguf")
    expected = logits_of(whole)

    def work(ranks: Ranks) -> tuple[Tensor, int]:
        model = loaded(tmp_path / "m.gguf", ranks)
        assert isinstance(model.inner if isinstance(model, RecordedDecoder) else model, AssembledDecoder)
        return logits_of(model), model.weight_bytes()

    answers = on_ranks(2, work)
    assert torch.equal(answers[0][0], answers[1][0])
    # activations of rounded layers are rounded, too: a sum that is split elsewhere may round to the next code
    tolerance = 1e-4 if kind == "F32" else 2e-2
    assert (answers[0][0] - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max()))
    halved = (kind, width) != ("Q4_0", 96)
    assert (answers[0][1] < 0.6 * whole.weight_bytes()) == halved


def test_tables_of_quantised_checkpoints_are_divided(tmp_path: Path) -> None:
    """Floats stand in them beside layers of codes."""
    folder = write_pair(tmp_path, "granite", "awq", **LAYERS).quantized

    def work(ranks: Ranks) -> int:
        return len(loaded(folder, ranks).shared_weights().embedding)

    assert sum(on_ranks(2, work)) == loaded(folder).config.vocab_size


EXPERTS = [
    ("dots1", 2, True),  # a tensor for each expert, a shared one, a correction
    pytest.param("dots1", 2, False, marks=pytest.mark.slow),  # its codes: below
    pytest.param("granitemoe", 2, False, marks=pytest.mark.slow),  # stacks in the checkpoint
    pytest.param("granitemoe", 4, True, marks=pytest.mark.slow),
    pytest.param("ernie4_5_moe", 4, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "size", "by_rank"), EXPERTS)
def test_experts_are_divided(tmp_path: Path, kind: str, size: int, by_rank: bool) -> None:
    save(small(kind, **LAYERS), tmp_path / kind)
    whole = loaded(tmp_path / kind)
    expected = logits_of(whole)

    def work(ranks: Ranks) -> tuple[Tensor, int]:
        model = loaded(tmp_path / kind, ranks, experts_by_rank=by_rank)
        return logits_of(model), model.weight_bytes()

    answers = on_ranks(size, work)
    for logits, _ in answers:
        assert torch.equal(logits, answers[0][0])
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    if not by_rank:  # experts of other ranks leave something that gives zeros, as large as these small ones
        assert max(num_bytes for _, num_bytes in answers) < 0.9 * whole.weight_bytes()


@pytest.mark.parametrize(
    ("kind", "form", "sizes"),
    [
        pytest.param("granite", "awq", {}, marks=pytest.mark.slow),  # its table: above
        ("dots1", "w4a16", {"moe_intermediate_size": 64}),
        ("dots1", "w4a16", {}),  # no group of 32 is in half of an expert: they are divided by rank
        pytest.param("granite", "gptq", {}, marks=pytest.mark.slow),
        pytest.param("gpt2", "w8a8", {}, marks=pytest.mark.slow),
        pytest.param("gpt_neox", "gptq", {}, marks=pytest.mark.slow),
        pytest.param("dots1", "awq", {"moe_intermediate_size": 64}, marks=pytest.mark.slow),
    ],
)
def test_quantised_weights_are_divided_as_they_are(
    tmp_path: Path, kind: str, form: str, sizes: dict[str, int]
) -> None:
    pair = write_pair(tmp_path, kind, form, **sizes, **LAYERS)
    whole = loaded(pair.quantized)
    expected = logits_of(whole)
    answers = on_ranks(2, lambda ranks: logits_of(loaded(pair.quantized, ranks)))
    assert torch.equal(*answers)
    worst = float((answers[0] - expected).abs().max() / expected.abs().max())
    assert worst < (0.1 if form == "w8a8" else 1e-4), "rows that are rounded to int8 are rounded in parts"


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4_weight_only", marks=pytest.mark.slow)])
def test_weights_that_are_rounded_at_load(tmp_path: Path, quantization: str) -> None:
    save(small("granite", **LAYERS), tmp_path / "model")
    options = {"dtype": torch.bfloat16, "quantization": quantization}
    expected = logits_of(loaded(tmp_path / "model", **options))
    answers = on_ranks(2, lambda ranks: logits_of(loaded(tmp_path / "model", ranks, **options)))
    assert torch.equal(*answers)
    assert (answers[0] - expected).abs().max() < 0.12 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("kind", "modules", "turned"),
    [
        ("granite", ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj"), False),
        pytest.param("gpt2", ("c_attn", "c_proj"), True, marks=pytest.mark.slow),
    ],
)
def test_ranks_add_their_parts_of_an_adapter(
    tmp_path: Path, kind: str, modules: tuple[str, ...], turned: bool
) -> None:
    save(small(kind, **LAYERS), tmp_path / kind)
    adapter = read_adapter(
        save_adapter(tmp_path / "adapter", tmp_path / kind, 3, modules=modules, turned=turned)
    )

    def work(ranks: Ranks | None) -> Tensor:
        model = AdaptedDecoder(loaded(tmp_path / kind, ranks))
        model.load(1, adapter)
        return logits_of(model, adapters=(1,))

    expected, plain = work(None), logits_of(loaded(tmp_path / kind))
    assert (expected - plain).abs().max() > 0.1 * plain.abs().max(), "it makes a difference"
    answers = on_ranks(2, work)
    assert torch.equal(*answers)
    assert (answers[0] - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


def test_a_rank_reads_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, embedding and output layer. Norms and biases are read whole."""
    save(small("granite", tie_word_embeddings=False, **LAYERS), tmp_path / "model")
    read: list[int] = []  # Transformers reads in threads of its own
    part, rows = stored.read_part, stored.read_rows

    def read_part(entry: Any, name: str, cut: Cut, dest: Tensor) -> None:
        read.append(dest.numel())
        part(entry, name, cut, dest)

    def read_rows(*args: Any, **options: Any) -> Tensor:
        found = rows(*args, **options)
        read.append(found.numel())
        return found

    monkeypatch.setattr(checkpoint, "count", read.append)
    monkeypatch.setattr(stored, "count", lambda n: None)  # says what is packed
    monkeypatch.setattr(stored, "read_part", read_part)
    monkeypatch.setattr(stored, "read_rows", read_rows)
    entries = checkpoint.scan_checkpoint(tmp_path / "model")
    matrices = sum(prod(e.shape) for e in entries.values() if len(e.shape) == 2)
    rest = sum(prod(e.shape) for e in entries.values()) - matrices
    on_ranks(2, lambda ranks: loaded(tmp_path / "model", ranks))
    assert matrices <= sum(read) <= 1.02 * (matrices + 2 * rest)


_MEASURE = """
import sys, torch
from pathlib import Path
from draftwise.models.loader import load_model
from tests.fakes.ranks import on_ranks
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
def load(folder):
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "quantization": sys.argv[3] or None}
    return on_ranks(2, lambda ranks: load_model(folder, ranks=ranks, **options), seconds=300)
warm = load(sys.argv[1])  # imports, buffers of torch
del warm
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
models = load(sys.argv[2])
print(status("VmHWM") - before, sum(model.weight_bytes() for model in models))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_the_peak_of_a_rank_is_its_share_and_one_layer(quantization: str, tmp_path: Path) -> None:
    """Of two ranks that load at once in one process, together."""
    native_or_skip()
    sizes = {
        "vocab_size": 2000, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_hidden_layers": 16, "head_dim": 96, "attention_multiplier": 0.01,
    }  # fmt: skip
    save(small("granite"), tmp_path / "small")
    config = transformers.AutoConfig.for_model("granite", **sizes)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "large"
    )
    places = [str(tmp_path / "small"), str(tmp_path / "large"), quantization]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MEASURE, *places],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    peak, weights = map(int, result.stdout.split())
    assert weights > 300e6
    assert peak < 1.2 * weights


def test_what_is_not_divided_is_named(tmp_path: Path) -> None:
    save(small("mamba", **LAYERS), tmp_path / "mamba")
    with pytest.raises(ModelLoadError, match="Transformers' code, which is not divided among ranks"):
        on_ranks(2, lambda ranks: loaded(tmp_path / "mamba", ranks))
    save(small("gpt_neox", **LAYERS), tmp_path / "neox")
    with pytest.raises(ConfigError, match="enable_expert_parallel: it has no experts"):
        on_ranks(2, lambda ranks: loaded(tmp_path / "neox", ranks, experts_by_rank=True))
    with pytest.raises(ModelLoadError, match="nothing of it can be divided among 5 ranks"):
        on_ranks(5, lambda ranks: loaded(tmp_path / "neox", ranks))
