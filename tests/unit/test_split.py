"""Models that are divided among ranks: the logits of the whole, each rank reads its own part, formats of all kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.fakes.architectures import save, small
from tests.fakes.gguf import convert
from tests.fakes.ranks import on_ranks
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.ranks import Part, Ranks
from draftwise.kv.storage import KVStorage
from draftwise.models import checkpoint
from draftwise.models.base import DecoderModel
from draftwise.models.cuts import Cut, Run, Split, axis_cut, copy_part, scaled, vocabulary_cut
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model

CPU = torch.device("cpu")
# with two ranks everything below can be halved, with four K/V heads are copied
KINDS = [
    ("llama", 2), ("llama", 4), ("mistral", 2), ("qwen2", 2), ("qwen3", 4), ("phi3", 4), ("gemma2", 2),
    ("gemma3_text", 2), ("mixtral", 2), ("qwen2_moe", 2), ("qwen3_moe", 4), ("glm4_moe", 2), ("deepseek_v2", 2),
    ("deepseek_v3", 4), ("gpt_oss", 2), ("olmoe", 2), ("olmoe", 4),
]  # fmt: skip
BY_RANK = [("mixtral", 2), ("qwen2_moe", 2), ("deepseek_v3", 3), ("qwen3_moe", 4)]


def logits_of(model: DecoderModel, adapters: tuple[int, ...] | None = None) -> Tensor:
    """Of 20 rows in two chunks, [20, V]; ``adapters``: the number of their adapter."""
    rows = np.arange(20, dtype=np.int32) * 7 % 251
    table = np.array([1, 2, 3], np.int32)
    with torch.inference_mode():
        kv = KVStorage(model.kv_layout(), 5, 8, model.dtype, model.device)
        found = []
        for start, end in ((0, 13), (13, 20)):
            batch = build_step_input([RowInput(rows[start:end], start, table)], 8, model.inputs_on)
            found.append(model.forward_logits(replace(batch, adapters=adapters), kv)[1])
        return torch.cat(found)


def loaded(folder: Path, ranks: Ranks | None = None, **options: Any) -> DecoderModel:
    return load_model(folder, dtype=options.pop("dtype", torch.float32), device=CPU, ranks=ranks, **options)


def compare(folder: Path, size: int, tolerance: float = 1e-4, **options: Any) -> None:
    whole = loaded(folder, **{k: v for k, v in options.items() if k != "experts_by_rank"})
    expected = logits_of(whole)

    def work(ranks: Ranks) -> tuple[Tensor, int, bool]:
        model = loaded(folder, ranks, **options)
        return logits_of(model), model.weight_bytes(), model.same_bits

    answers = on_ranks(size, work)
    for logits, _, same_bits in answers:
        assert torch.equal(logits, answers[0][0]), "all ranks have the same bits"
        assert same_bits
        assert (logits - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max()))
    assert max(weights for _, weights, _ in answers) < 0.85 * whole.weight_bytes()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("split")}


def folder_of(folders: dict[str, Path], kind: str, **sizes: Any) -> Path:
    if kind not in folders:
        folders[kind] = folders[""] / kind
        save(small(kind, **sizes), folders[kind])
    return folders[kind]


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_logits_are_those_of_the_whole(folders: dict[str, Path], kind: str, size: int) -> None:
    compare(folder_of(folders, kind), size)


@pytest.mark.parametrize(("kind", "size"), BY_RANK)
def test_experts_by_rank(folders: dict[str, Path], kind: str, size: int) -> None:
    if size == 3:
        kind, sizes = kind, {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
        folder = folders[""] / "three"
        save(small(kind, **sizes, moe_intermediate_size=48), folder)
    else:
        folder = folder_of(folders, kind)
    expected = logits_of(loaded(folder))
    answers = on_ranks(size, lambda ranks: logits_of(loaded(folder, ranks, experts_by_rank=True)))
    for logits in answers:
        assert torch.equal(logits, answers[0])
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("quantization", ["int8", "int4", "int8_weight_only", "int4_weight_only"])
def test_weights_that_are_rounded_at_load(folders: dict[str, Path], quantization: str) -> None:
    """Sums over halves of the inputs are rounded in other places: near, not equal."""
    compare(folder_of(folders, "llama"), 2, 0.12, dtype=torch.bfloat16, quantization=quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_by_rank_that_are_rounded_at_load(folders: dict[str, Path], quantization: str) -> None:
    folder = folder_of(folders, "mixtral")
    expected = logits_of(loaded(folder, dtype=torch.bfloat16, quantization=quantization))

    def work(ranks: Ranks) -> Tensor:
        return logits_of(
            loaded(folder, ranks, dtype=torch.bfloat16, quantization=quantization, experts_by_rank=True)
        )

    answers = on_ranks(2, work)
    assert torch.equal(*answers)
    assert (answers[0] - expected).abs().max() < 0.12 * max(1.0, float(expected.abs().max()))


def test_experts_in_mxfp4_are_divided_by_blocks(tmp_path: Path) -> None:
    """gpt-oss: gates and ups take turns along the outputs, blocks of 32 stand along the inputs."""
    folder = tmp_path / "oss"
    save(small("gpt_oss", intermediate_size=128), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = (count, outputs, inputs // 32)
        tensors[name + "_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        tensors[name + "_scales"] = torch.randint(118, 123, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    compare(folder, 2)
    compare(folder, 4)


def test_a_rank_reads_its_own_bytes_and_few_besides(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(folders, "mixtral")
    counted: list[int] = []

    class Slice:
        def __init__(self, part: Any) -> None:
            self._part = part

        def __getattr__(self, name: str) -> Any:
            return getattr(self._part, name)

        def __getitem__(self, index: Any) -> Tensor:
            found: Tensor = self._part[index]
            counted.append(found.numel() * found.element_size())
            return found

    class Counting:
        def __init__(self, file: Path, framework: str) -> None:
            self._handle: Any = safe_open(file, framework=framework)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self._handle, name)

        def get_slice(self, name: str) -> Slice:
            return Slice(self._handle.get_slice(name))

    monkeypatch.setattr(checkpoint, "safe_open", Counting)
    loaded(folder)
    whole, counted[:] = sum(counted), []
    assert whole == sum(path.stat().st_size for path in folder.glob("*.safetensors")) - header_bytes(folder)
    for size, by_rank in ((2, False), (2, True), (4, False)):
        on_ranks(size, lambda ranks, by_rank=by_rank: loaded(folder, ranks, experts_by_rank=by_rank))  # type: ignore[misc]
        assert sum(counted) < 1.2 * whole * (1 if size == 2 else 1.05), (
            "norms, routers and copied heads besides"
        )
        counted.clear()


def header_bytes(folder: Path) -> int:
    """Of safetensors files: a length of eight bytes and so many more."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


def test_what_cannot_be_divided(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        save(
            small("llama", num_attention_heads=6, num_key_value_heads=2, hidden_size=96), folders[""] / "six"
        )
        on_ranks(3, lambda ranks: loaded(folders[""] / "six", ranks))


# ---------------------------------------------------------------------------------------------- what is read


def test_cuts() -> None:
    qkv = Split(((Run(4), Run(2, 2), Run(2, 2)),))  # 16 rows of q, 4 of k, 4 of v on 4 ranks
    assert qkv.outputs(Part(2, 4), 0, 8) == (24, ((8, 12), (18, 20), (22, 24)))
    assert Split(inputs=True).columns(Part(1, 2), 3) == (6, ((3, 6),))
    assert scaled(((8, 16),), 32, 4, "x") == ((1, 2),)
    cut = vocabulary_cut(Part(3, 4), 10, 2)
    assert cut.ranges == (((9, 10),), ((0, 2),)) and cut.own_shape == (1, 2)
    assert axis_cut(Part(1, 2), (2, 8), 0) == Cut((4, 8), (((2, 4),), ((0, 8),)))


@pytest.mark.parametrize("window", [1, 40, 1 << 20])
def test_parts_are_copied_whatever_the_window(window: int) -> None:
    stored = torch.arange(24 * 10, dtype=torch.float32).view(24, 10)
    reads = []

    def read(start: int, end: int, *columns: slice) -> Tensor:
        reads.append(end - start)
        return stored[(slice(start, end), *columns)]

    cut = Cut((24, 10), (((8, 12), (18, 20)), ((5, 10),)))
    dest = torch.zeros(cut.own_shape)
    copy_part(read, cut, dest, window)
    assert torch.equal(dest, torch.cat((stored[8:12, 5:], stored[18:20, 5:])))
    assert sum(reads) == 6 and max(reads) == (1 if window == 1 else 2 if window == 40 else 4)


# ---------------------------------------------------------------------------------------------- exchanges


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_go_in_the_order_of_the_ranks(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    terms = [torch.randn(700, 1000, generator=generator).to(dtype) for _ in range(size)]  # more than a piece
    expected = terms[0].float()
    for term in terms[1:]:
        expected = expected + term.float()

    def work(ranks: Ranks) -> list[Tensor]:
        mine = terms[ranks.part.rank]
        return [ranks.sum(mine[:rows].clone()) for rows in (700, 1, 16)]

    for answer in on_ranks(size, work):
        for found in answer:
            assert torch.equal(found, expected[: len(found)].to(dtype))


@pytest.mark.parametrize(("total", "size"), [(10, 4), (8, 2), (300_001, 2), (700_000, 2)])
def test_columns_are_gathered(total: int, size: int) -> None:
    whole = torch.arange(3 * total, dtype=torch.float32).view(3, total)
    step = -(-total // size)

    def work(ranks: Ranks) -> Tensor:
        first = ranks.part.rank * step
        return ranks.gather(whole[:, first : first + step], total)

    for found in on_ranks(size, work):
        assert torch.equal(found, whole)


def test_objects_are_shared_and_told() -> None:
    def work(ranks: Ranks) -> tuple[list[bytes], int, object]:
        rank = ranks.part.rank
        return ranks.share(b"x" * (rank * 3_000_000)), ranks.least(7 - rank), ranks.told({"rank": rank})

    for shared, least, told in on_ranks(3, work):
        assert [len(one) for one in shared] == [0, 3_000_000, 6_000_000]
        assert least == 5 and told == {"rank": 0}


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    def work(ranks: Ranks) -> None:
        if ranks.part.rank == 0:
            ranks.sum(torch.zeros(4))

    with pytest.raises(OSError, match="dw_ranks_sum"):
        on_ranks(2, work, seconds=0.2)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_gguf_files_are_divided(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    save(small("llama", **sizes), tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "gguf" / "model.gguf", "llama", kind)
    # activations of rounded layers are rounded, too: a sum that is split elsewhere may round to the next code
    compare(tmp_path / "gguf", 2, tolerance=1e-4 if kind == "F16" else 2e-2)


def test_ranks_that_would_cut_blocks_of_a_gguf_file_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    save(small("llama", **sizes), tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "model.gguf", "llama", "Q8_0")
    with pytest.raises(
        ModelLoadError, match=r"model.gguf: 48 inputs are not a multiple of 32, the block of Q8_0"
    ):
        on_ranks(2, lambda ranks: loaded(tmp_path / "model.gguf", ranks))
