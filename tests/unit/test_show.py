"""``draftwise show`` says of a model what loading it would show, from headers alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.fakes.architectures import save, small
from tests.fakes.tiny import save_llama
from tests.native import native_or_skip

from draftwise.cli import main
from draftwise.cli.show import size
from draftwise.config.embedded import embedded_path
from draftwise.errors import ModelLoadError
from draftwise.kernels.ranks import Ranks
from draftwise.kv.storage import KVStorage
from draftwise.models.checkpoint import TensorEntry
from draftwise.models.describe import CACHE_DTYPES, describe, describe_ranks
from draftwise.models.drafters import given
from draftwise.models.loader import load_model

CPU = torch.device("cpu")


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main.main(["show", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
def test_memory_is_what_the_loaded_model_takes(name: str) -> None:
    native_or_skip()
    facts = describe(embedded_path("target"))
    rounded = name.startswith("int")
    model = load_model(
        embedded_path("target"),
        dtype=torch.bfloat16 if rounded else getattr(torch, name),
        device=CPU,
        quantization=name if rounded else None,
    )
    assert facts.weight_bytes()[name] == pytest.approx(model.weight_bytes(), rel=0.02)
    for dtype in CACHE_DTYPES:
        block = KVStorage.bytes_per_block(model.kv_layout(), 16, CACHE_DTYPES[dtype])
        assert facts.cache_bytes()[dtype] * 16 == block


def tiny_general(folder: Path, kind: str) -> Path:
    """A checkpoint of a family without code of its own: grouped heads, latent attention, or experts."""
    base: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "starcoder2": {},
        "minicpm3": {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 8,
        },
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **(base | more[kind]))
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["starcoder2", "minicpm3"])
def test_a_general_model_is_looked_at_without_its_weights(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_general(tmp_path, kind)
    assert main.main(["show", str(folder)]) == 0
    assert "our operations if they compute all of it" in capsys.readouterr().out, "these are put together"
    facts = describe(folder)
    assert facts.way == "general" and facts.refused is None
    assert facts.layout_is_exact == (kind != "minicpm3"), "numbers tell whether what is latent can be kept so"
    model = load_model(folder, dtype=torch.float32, device=CPU)
    assert facts.layout == model.kv_layout()
    assert facts.parameters is not None
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert facts.parameters.total == sum(p.numel() for p in loaded.parameters())


@pytest.mark.parametrize(
    "kind",
    [  # with attention beside the state, and without
        pytest.param("falcon_h1", marks=pytest.mark.slow),
        "lfm2",
        "mamba",
        pytest.param("recurrent_gemma", marks=pytest.mark.slow),
    ],
)
def test_states_are_those_of_the_loaded_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(small(kind), tmp_path / "model")
    facts = describe(tmp_path / "model")
    model = load_model(tmp_path / "model", dtype=torch.bfloat16, device=CPU)
    assert facts.state == model.state_spec() and facts.layout == model.kv_layout()
    found = show(capsys, str(tmp_path / "model"))
    assert found["state_bytes"] == facts.state.num_bytes  # type: ignore[union-attr]
    assert main.main(["show", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "a request and draft" in out and ("a token\n" in out) == (kind != "mamba")


def test_seventy_billion_weights_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of which only the header exists: the rest is a hole as long as the weights, longer than memory."""
    hidden, inner, layers, vocab = 8192, 28672, 80, 128256
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden], "model.norm.weight": [hidden],
    }  # fmt: skip
    for i in range(layers):
        of_layer = {
            "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_proj": [hidden, hidden],
            "self_attn.k_proj": [1024, hidden], "self_attn.v_proj": [1024, hidden],
            "self_attn.o_proj": [hidden, hidden],
            "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner],
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }))  # fmt: skip
    found = show(capsys, str(tmp_path))
    assert found["parameters"] == 70_553_706_496 and found["way"] == "own" and found["refused"] is None
    assert found["cache_bytes_per_token"]["bfloat16"] == 2 * 2 * 80 * 8 * 128
    assert found["weight_bytes"]["bfloat16"] == found["stored_bytes"]
    assert 0.5 < found["weight_bytes"]["int4"] / found["weight_bytes"]["int8"] < 0.56
    assert file.stat().st_blocks * 512 < 1 << 20, "the file is a hole"


def test_drafters_of_the_embedded_model_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = {d["method"]: d for d in show(capsys)["drafters"]}
    assert found.keys() == {"ngram", "suffix", "early_exit", "draft_model", "eagle3", "medusa", "mtp"}
    assert all(d["fits"] for d in found.values())
    assert found["eagle3"]["num_speculative_tokens"] == 5 and found["eagle3"]["parameters"] > 1_000_000


def test_a_head_for_another_target_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_llama(tmp_path / "model", seed=1)
    for part in ("eagle3", "medusa", "mtp", "draft"):
        (drafter,) = [
            d for d in show(capsys, model, "--speculative-model", str(embedded_path(part)))["drafters"]
            if d["model"] is not None
        ]  # fmt: skip
        assert not drafter["fits"] and drafter["refused"], part
    assert "vocabulary of 4096 tokens, the model one of 61" in drafter["refused"]


def test_a_smaller_model_beside_it_is_found_and_a_larger_one_is_not(tmp_path: Path) -> None:
    large = save_llama(tmp_path / "large", seed=1, num_hidden_layers=6)
    small = save_llama(tmp_path / "small", seed=2, num_hidden_layers=1)
    save_llama(tmp_path / "other", seed=3, num_hidden_layers=1, vocab_size=64)
    from draftwise.models.drafters import beside

    assert [(d.method, d.model) for d in beside(describe(large))] == [("draft_model", small)]
    assert beside(describe(small)) == []


def test_a_refused_model_is_shown_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(save_llama(tmp_path, seed=1))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "hidden_act": "relu"}))
    found = show(capsys, str(folder))
    assert found["refused"] == "activation 'relu' is not supported (only silu)"
    assert found["stored_bytes"] > 0 and found["drafters"] == []
    assert given(describe(folder), str(embedded_path("draft"))).refused == "the model itself cannot be served"


def test_what_stands_behind_windows_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of three layers see 16 of 64 tokens; if all do, blocks are given back, and nothing is kept for nobody."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes: dict[str, Any] = {"sliding_window": 16, "max_position_embeddings": 64, "num_hidden_layers": 3}
    save(small("gemma2", layer_types=kinds, **sizes), tmp_path / "some")
    found = show(capsys, str(tmp_path / "some"))
    per_token = found["cache_bytes_per_token"]
    assert found["cache_bytes_behind_windows"] == {n: c * 2 // 3 * 48 for n, c in per_token.items()}
    assert main.main(["show", str(tmp_path / "some")]) == 0
    assert "of that behind windows: kept, and not read" in " ".join(capsys.readouterr().out.split())
    save(small("mistral", **sizes), tmp_path / "all")
    assert show(capsys, str(tmp_path / "all"))["cache_bytes_behind_windows"] == {}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe", "starcoder2"])
def test_a_config_alone_tells_sizes(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before gigabytes are fetched: the same numbers as with the weights."""
    save(small(kind), tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "whole" / name).exists():
            (tmp_path / "bare" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    whole, bare = describe(tmp_path / "whole"), describe(tmp_path / "bare")
    assert bare.refused is None and bare.way == whole.way == ("general" if kind == "starcoder2" else "own")
    assert whole.parameters is not None and bare.parameters is not None
    assert bare.parameters.total == whole.parameters.total
    assert bare.cache_bytes() == whole.cache_bytes() != {}
    for name, wanted in whole.weight_bytes().items():
        assert bare.weight_bytes()[name] == pytest.approx(wanted, rel=0.02), name
    assert main.main(["show", str(tmp_path / "bare")]) == 0
    assert "none in this folder: sizes are reckoned from config.json" in " ".join(
        capsys.readouterr().out.split()
    )
    # Weights of a kind that is not read, or that are half there, are no config alone.
    (tmp_path / "bare" / "pytorch_model.bin").write_bytes(b"")
    assert main.main(["show", str(tmp_path / "bare")]) == 2
    assert "has no safetensors, only pytorch_model.bin" in capsys.readouterr().err


def test_a_quantised_config_alone_says_its_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(save_llama(tmp_path, seed=1))
    (folder / "model.safetensors").unlink()
    raw = json.loads((folder / "config.json").read_text())
    written = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": written}))
    found = show(capsys, str(folder))
    assert found["refused"] is None and found["quantized"] and found["weight_bytes"] == {}
    assert found["cache_bytes_per_token"]


def test_missing_tensors_are_seen(tmp_path: Path) -> None:
    folder = Path(save_llama(tmp_path, seed=1))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    assert "tensors are missing: model.layers.2" in str(describe(folder).refused)


def test_the_table_fits_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_llama(tmp_path / ("deep" * 20) / "model", seed=1)
    for arguments in ([], [folder], [folder, "--speculative-model", str(embedded_path("eagle3"))]):
        assert main.main(["show", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 10 and max(map(len, lines)) <= 80
        assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/model"], "does not exist"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--colour"], "unrecognized argument"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err


def test_the_hub_is_asked_for_headers_and_not_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose config.json alone is in the cache."""
    import huggingface_hub

    local = Path(save_llama(tmp_path / "model", seed=1))
    cached = tmp_path / "snapshots" / "0" / "config.json"
    cached.parent.mkdir(parents=True)
    cached.write_bytes((local / "config.json").read_bytes())
    from draftwise.models.checkpoint import scan_checkpoint

    entries = scan_checkpoint(local)
    wanted: list[list[str]] = []

    class Info:
        def __init__(self, entry: TensorEntry) -> None:
            self.shape, self.dtype = list(entry.shape), entry.dtype

    class Header:
        tensors = {name: Info(entry) for name, entry in entries.items()}  # noqa: RUF012

    class Metadata:
        files_metadata = {"model.safetensors": Header()}  # noqa: RUF012

    def snapshot(*_: object, allow_patterns: list[str], **__: object) -> str:
        wanted.append(allow_patterns)
        return str(cached.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: Metadata())
    facts = describe("some/model")
    assert facts.refused is None and facts.parameters == describe(local).parameters
    assert not any("safetensors" in pattern for patterns in wanted for pattern in patterns)

    def offline(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", offline)
    with pytest.raises(
        ModelLoadError, match="the hub does not give the headers of 'some/model': OSError: no route"
    ):
        describe("some/model")


def test_sizes_are_readable() -> None:
    assert [size(n) for n in (0, 1023, 1536, 20 << 30, 999 << 20)] == [
        "0 B", "1023 B", "1.5 KiB", "20 GiB", "999 MiB",
    ]  # fmt: skip


def test_what_each_rank_would_have(capsys: pytest.CaptureFixture[str]) -> None:
    whole = show(capsys)
    assert whole["ranks"] == []
    report = show(capsys, "--tensor-parallel-size", "4")
    ranks = report["ranks"]
    assert [(r["rank"], r["heads"], r["kv_heads"]) for r in ranks] == [(i, 1, 1) for i in range(4)]
    for name, count in whole["weight_bytes"].items():
        assert count < sum(r["weight_bytes"][name] for r in ranks) < 1.1 * count, "norms, K/V heads: on all"
    for name, count in whole["cache_bytes_per_token"].items():
        assert all(r["cache_bytes_per_token"][name] == count // 2 for r in ranks), "two K/V heads, each twice"


def test_what_a_rank_would_have_is_what_it_loads() -> None:
    from tests.fakes.ranks import on_ranks

    folder = embedded_path("target")
    shown = describe_ranks(describe(folder), 2)

    def loaded(ranks: Ranks) -> int:
        device = torch.device("cpu")
        return load_model(folder, dtype=torch.float32, device=device, ranks=ranks).weight_bytes()

    for facts, nbytes in zip(shown, on_ranks(2, loaded), strict=True):
        assert facts.weight_bytes()["float32"] == pytest.approx(nbytes, rel=0.02)
