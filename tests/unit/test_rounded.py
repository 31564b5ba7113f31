"""Rounded weights on disk: the same bits as rounding at every start, whole or not at all, never another model's."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.architectures import save, small
from tests.fakes.tiny import save_llama
from tests.native import native_or_skip

from draftwise import LLM
from draftwise.errors import ConfigError
from draftwise.kv.storage import KVStorage
from draftwise.models import rounded
from draftwise.models.general import check
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import is_quantized_checkpoint, load_model
from draftwise.models.source import scan

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    native_or_skip()
    return save_llama(tmp_path_factory.mktemp("models") / "small", seed=6, **SIZES)


def logits(folder: str, scheme: str, cache: Path | None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    model = load_model(folder, dtype=dtype, device=CPU, quantization=scheme, quantization_cache=cache)
    kv = KVStorage(model.kv_layout(), 8, 4, dtype, CPU)
    table = torch.arange(8, dtype=torch.int32).numpy()
    with torch.inference_mode():
        return model.forward_logits(build_step_input([RowInput([3, 9, 1, 7, 5], 0, table)], 4, CPU), kv)[1]


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("granite", "int8_dynamic"),
        ("dots1", "int4_dynamic"),
        ("phimoe", "int8_weight_only"),
        pytest.param("gpt_neox", "int4_weight_only", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_a_model_without_a_file_of_its_own(kind: str, scheme: str, tmp_path: Path) -> None:
    """Put together, a mixture of experts, and on Transformers' code: the second start reads codes."""
    native_or_skip()
    save(small(kind), tmp_path / "model")
    model, cache = str(tmp_path / "model"), tmp_path / "cache"
    want = logits(model, scheme, None)
    assert torch.equal(logits(model, scheme, cache), want), "as written"
    (kept,) = cache.iterdir()
    names = [name for name in scan(kept) if name.endswith("weight_packed")]
    assert len(names) > 5 and not any("lm_head" in name or "embed" in name for name in names)
    assert any(".experts." in name for name in names) == (kind in ("dots1", "phimoe"))
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert torch.equal(logits(model, scheme, cache), want), "as read"
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before


@pytest.mark.parametrize(
    "scheme",
    [
        "int8_weight_only",
        "int8_dynamic",
        "int4_weight_only",
        "int4_dynamic",
        "int4_weight_only_g32",
        "int4_dynamic_g128",
    ],
)
def test_the_same_bits_written_and_read(folder: str, scheme: str, tmp_path: Path) -> None:
    """Of layers of 96 inputs, which hold no whole number of groups of 64 or 128, none is kept rounded."""
    want = logits(folder, scheme, None)
    assert torch.equal(logits(folder, scheme, tmp_path), want), "as written"
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(f"small-{scheme}-") and is_quantized_checkpoint(kept)
    written = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert torch.equal(logits(folder, scheme, tmp_path), want), "as read"
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == written


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_weight_only_g32"])
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_layers_that_are_not_rounded_are_kept_as_they_are(kind: str, scheme: str, tmp_path: Path) -> None:
    """The layer that latent attention absorbs: with or without the cache it is floats."""
    native_or_skip()
    save(small(kind), tmp_path / "model")
    model, cache = str(tmp_path / "model"), tmp_path / "cache"
    want = logits(model, scheme, None)
    for _ in ("written", "read"):
        assert torch.equal(logits(model, scheme, cache), want)
    (kept,) = cache.iterdir()
    names = list(scan(kept))
    assert any("kv_a_proj_with_mqa.weight_packed" in name for name in names)
    assert any(name.endswith("kv_b_proj.weight") for name in names)


def test_other_weights_formats_and_dtypes_have_folders_of_their_own(folder: str, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "small", seed=7, **SIZES)  # equal names and sizes
    cache = tmp_path / "cache"
    results = [
        logits(folder, "int8_dynamic", cache),
        logits(other, "int8_dynamic", cache),
        logits(folder, "int8_dynamic", cache, torch.float32),
        logits(folder, "int8_weight_only", cache),
    ]
    assert len(list(cache.iterdir())) == 4
    assert not torch.equal(results[0], results[1])


def test_what_another_process_has_written_meanwhile_stays(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be reading it."""
    want = logits(folder, "int8", None)
    write, others = rounded._write, []

    def slower(target: Path, *args: Any) -> None:
        write(target, *args)
        place = tmp_path / target.name[1:].rpartition(".")[0]
        shutil.copytree(target, place)
        others.append((place, place.stat().st_ino))

    monkeypatch.setattr(rounded, "_write", slower)
    assert torch.equal(logits(folder, "int8", tmp_path), want)
    [(place, inode)] = others
    assert place.stat().st_ino == inode and list(tmp_path.iterdir()) == [place]


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match="name a folder"):
        rounded.default_cache()


@pytest.mark.parametrize("damage", ["byte", "missing", "manifest"])
def test_damaged_folders_are_made_anew(
    folder: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    want = logits(folder, "int8", tmp_path)
    (kept,) = tmp_path.iterdir()
    victim = sorted(kept.glob("*.safetensors"))[0]
    if damage == "byte":
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1
        victim.write_bytes(data)
    elif damage == "missing":
        victim.unlink()
    else:
        (kept / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING, "draftwise"):
        assert torch.equal(logits(folder, "int8", tmp_path), want)
    assert "damaged" in caplog.text
    caplog.clear()
    assert torch.equal(logits(folder, "int8", tmp_path), want)
    assert "damaged" not in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [kept.name], "nothing half-written is left"


def test_a_writer_that_fails_leaves_nothing_and_the_model_loads(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = logits(folder, "int8", None)

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(rounded, "save_file", full)
    with caplog.at_level(logging.WARNING, "draftwise"):
        assert torch.equal(logits(folder, "int8", tmp_path / "cache"), want)
    assert "no space left" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_checkpoint_that_changed_is_noticed(tmp_path: Path) -> None:
    native_or_skip()
    path = Path(save_llama(tmp_path / "model", seed=8, **SIZES))
    cache = tmp_path / "cache"
    logits(str(path), "int8", cache)
    os.utime(path / "model.safetensors", ns=(1, 1))
    logits(str(path), "int8", cache)
    assert len(list(cache.iterdir())) == 2


def test_the_engines_option(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with LLM(
        folder,
        device="cpu",
        quantization="int8",
        quantization_cache="auto",
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        speculation_control="static",
    ) as llm:
        assert llm.guarantees.same_bits
    assert len(list((tmp_path / "draftwise" / "quantized").iterdir())) == 1
    with pytest.raises(ConfigError, match=r"quantization_cache.*quantization="):
        LLM(folder, device="cpu", quantization_cache="auto", speculation_control="static")


def test_weight_bytes_are_what_is_kept(folder: str, tmp_path: Path) -> None:
    """Products of 64 and 96 inputs: outputs are padded to 32, scales and bytes count; the embedding stays bfloat16."""
    outputs = {64: 2 * (64 + 2 * 32) + 2 * 64 + 2 * 2 * 96, 96: 2 * 64}  # of two layers, by inputs
    vocab = 61
    norms, embedding, head = 4 * 5 * 64, vocab * 64 * 2, 64  # of which 64: the head's outputs, padded

    def size(scheme: str | None) -> int:
        return load_model(folder, dtype=torch.bfloat16, device=CPU, quantization=scheme).weight_bytes()

    weights = sum(n * inputs for inputs, n in outputs.items())
    assert size(None) == norms + embedding + 2 * (weights + head * 64)
    assert size("int8") == norms + embedding + weights + head * 64 + 4 * (sum(outputs.values()) + head)
    assert size("int4") < size("int8") < size(None)
    before = load_model(
        folder, dtype=torch.bfloat16, device=CPU, quantization="int4", quantization_cache=tmp_path
    )
    again = load_model(
        folder, dtype=torch.bfloat16, device=CPU, quantization="int4", quantization_cache=tmp_path
    )
    assert before.weight_bytes() == again.weight_bytes() == size("int4")


@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_layers_that_the_code_reads_are_floats_in_the_comparison_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba's code looks at its output layer, which then is not rounded: the logits to compare with must say so."""
    native_or_skip()
    monkeypatch.setattr(check, "_ROUNDED_ROWS", 0.0)
    save(small("mamba", tie_word_embeddings=False), tmp_path / "model")
    load_model(tmp_path / "model", dtype=torch.float32, device=CPU, quantization="int8")
