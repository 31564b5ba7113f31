"""`resolve_engine_config`: what users of other engines pass resolves, or is refused by name."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwise.config import EngineConfig, SpeculativeConfig, resolve_engine_config
from draftwise.errors import ConfigError


def refused(*words: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolve_engine_config(**kwargs)
    for word in words:
        assert word in str(error.value), str(error.value)
    return str(error.value)


def test_defaults_of_a_users_model() -> None:
    config = resolve_engine_config(model="M", device="cpu")
    assert config.model == "M" and not config.embedded
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (64, 2048, 16)
    assert config.enable_prefix_caching and config.enable_chunked_prefill
    assert config.seed == 0 and config.dtype == "auto" and config.notes == ()
    assert config.speculative == () and config.default_method == "none"
    assert [spec.method for spec in config.drafters] == ["ngram", "suffix"]


def test_embedded_model_brings_its_drafters() -> None:
    from draftwise.config.embedded import embedded_path

    config = resolve_engine_config(device="cpu")
    assert config.embedded and config.model == str(embedded_path("target"))
    assert [(spec.method, spec.model, spec.num_speculative_tokens) for spec in config.speculative] == [
        ("mtp", str(embedded_path("mtp")), 4),
        ("draft_model", str(embedded_path("draft")), 4),
    ]
    assert config.default_method == "mtp"
    assert [s.method for s in config.drafters] == ["mtp", "draft_model", "ngram", "suffix"]
    assert (
        resolve_engine_config(device="cpu", num_speculative_tokens=2).speculative[0].num_speculative_tokens
        == 2
    )
    both = resolve_engine_config(
        device="cpu", speculative_config=[{"method": "ngram"}, {"method": "draft_model"}]
    )
    assert [s.method for s in both.speculative] == ["ngram", "draft_model"]
    assert both.speculative[1].model == str(embedded_path("draft"))


def test_speculation_switched_off() -> None:
    for off in ({"method": "none"}, [], '{"method": "none"}', "null"):
        config = resolve_engine_config(device="cpu", speculative_config=off)
        assert config.speculative == () and config.default_method == "none"
    refused("none", device="cpu", speculative_config={"method": "none", "num_speculative_tokens": 3})
    refused("none", device="cpu", speculative_config=[{"method": "none"}, {"method": "ngram"}])


def test_several_drafters() -> None:
    specs = [{"method": "ngram"}, SpeculativeConfig(method="draft_model", model="D")]
    config = resolve_engine_config(model="M", device="cpu", speculative_config=specs)
    assert config.default_method == "ngram"
    assert [spec.method for spec in config.drafters] == ["ngram", "draft_model", "suffix"]
    refused("twice", model="M", device="cpu", speculative_config=[{"method": "ngram"}, {"method": "ngram"}])


def test_old_spellings(tmp_path: Path) -> None:
    config = resolve_engine_config(model="M", device="cpu", speculative_model="D", num_speculative_tokens=5)
    (spec,) = config.speculative
    assert (spec.method, spec.model, spec.num_speculative_tokens) == ("draft_model", "D", 5)
    ngram = resolve_engine_config(
        model="M", device="cpu", speculative_method="ngram", num_speculative_tokens=3
    )
    assert ngram.speculative[0].num_speculative_tokens == 3
    refused(
        "speculative_model",
        model="M",
        device="cpu",
        speculative_model="D",
        speculative_config={"method": "ngram"},
    )
    refused("num_speculative_tokens", "needs", model="M", device="cpu", num_speculative_tokens=5)


# Configurations of other engines' users, as they stand.


def test_users_ngram() -> None:
    config = resolve_engine_config(
        model="M",
        tensor_parallel_size=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    )
    (spec,) = config.speculative
    assert (spec.num_speculative_tokens, spec.prompt_lookup_max) == (5, 4)


def test_users_eagle_with_tensor_parallelism() -> None:
    eagle = {"method": "eagle", "model": "HEAD", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2}
    common: dict[str, Any] = {
        "model": "M",
        "distributed_executor_backend": "mp",
        "enforce_eager": True,
        "async_scheduling": True,
    }
    odd = eagle | {"draft_tensor_parallel_size": 3}
    refused("draft_tensor_parallel_size", "3", **common, tensor_parallel_size=4, speculative_config=odd)
    config = resolve_engine_config(**common, tensor_parallel_size=1, speculative_config=eagle, device="cpu")
    (spec,) = config.speculative
    assert (spec.method, spec.model, spec.num_speculative_tokens) == ("eagle", "HEAD", 2)
    resolved = resolve_engine_config(**common, device="cpu")
    assert len(resolved.notes) == 2 and resolved.speculation_control == "adaptive"


@pytest.mark.parametrize("given", [None, True, False])
def test_steps_are_planned_ahead_on_a_gpu(given: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for device, usual in (("cpu", False), ("cuda", True), ("auto", True)):
        resolved = resolve_engine_config(model="M", device=device, async_scheduling=given)
        assert resolved.async_scheduling is (usual if given is None else given)
        assert resolved.speculation_control == "adaptive"


def test_users_suffix() -> None:
    config = resolve_engine_config(
        model="M",
        tensor_parallel_size=1,
        enforce_eager=True,
        speculative_config={"method": "suffix", "num_speculative_tokens": 15},
        device="cpu",
    )
    (spec,) = config.speculative
    assert (config.default_method, spec.num_speculative_tokens) == ("suffix", 15)


def test_users_old_eagle_spelling() -> None:
    old: dict[str, Any] = {
        "speculative_model": "D",
        "num_speculative_tokens": 5,
        "speculative_method": "eagle",
    }
    (spec,) = resolve_engine_config(model="M", device="cpu", **old).speculative
    assert (spec.method, spec.model, spec.num_speculative_tokens) == ("eagle", "D", 5)


def test_users_hidden_state_extraction() -> None:
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 34]}}
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/tmp/x"},
    }
    spec = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    config = resolve_engine_config(
        model="M", tensor_parallel_size=1, device="cpu", speculative_config=spec, kv_transfer_config=connector
    )
    assert config.speculative[0].extracted_layers == (2, 18, 34)
    assert config.kv_transfer_config == connector


SERVE: dict[str, Any] = {
    "model": "M",
    "speculative_config": '{"num_speculative_tokens": 2, "method": "deepseek_mtp", '
    '"disable_padded_drafter_batch": "False"}',
    "served_model_name": "dsv3",
    "max_model_len": "36768",
    "max_num_batched_tokens": "5000",
    "max_num_seqs": "10",
    "seed": "1024",
    "data_parallel_size": "1",
    "trust_remote_code": True,
    "gpu_memory_utilization": "0.9",
    "compilation_config": '{"cudagraph_mode": "FULL_DECODE_ONLY"}',
}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tensor_parallel_size": "0"}, ("tensor_parallel_size", "0")),
        ({"pipeline_parallel_size": "2"}, ("pipeline_parallel_size", "tensor_parallel_size")),
        ({"enable_expert_parallel": True}, ("enable_expert_parallel",)),
        ({"quantization": "ascend"}, ("quantization", "'ascend'")),
        ({"port": "20004"}, ("port", "server")),
    ],
)
def test_users_serve_command_is_refused_by_name(more: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(*words, **SERVE, **more)


def test_users_serve_command_without_what_is_missing() -> None:
    config = resolve_engine_config(**SERVE, device="cpu")
    (spec,) = config.speculative
    assert (spec.method, spec.model, spec.num_speculative_tokens) == ("mtp", None, 2)
    assert (config.max_model_len, config.max_num_batched_tokens, config.max_num_seqs) == (36768, 5000, 10)
    assert config.seed == 1024 and config.trust_remote_code
    noted = " ".join(config.notes)
    for name in ("served_model_name", "gpu_memory_utilization", "compilation_config"):
        assert name in noted


def test_users_capture_sizes() -> None:
    config = resolve_engine_config(
        model="M",
        device="cpu",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        cudagraph_capture_sizes=[5, 10, 15, 20],
    )
    assert config.cudagraph_capture_sizes == (5, 10, 15, 20)
    assert "cudagraph_capture_sizes" in config.notes[0]


# Notes, refusals, ranges.


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="draftwise"):
        config = resolve_engine_config(
            model="M",
            device="cpu",
            enforce_eager="True",
            swap_space=4,
            speculative_config={"method": "ngram", "disable_padded_drafter_batch": True},
        )
    assert [record.getMessage() for record in caplog.records] == list(config.notes)
    assert len(config.notes) == 3


def test_graphs_of_a_drafter_are_noted_where_there_are_none() -> None:
    spec = {"method": "draft_model", "model": "D", "enforce_eager": True}
    (note,) = resolve_engine_config(model="M", device="cpu", speculative_config=spec).notes
    assert note.startswith("speculative_config.enforce_eager has no effect") and "CPU" in note


def test_what_is_off_is_not_noted() -> None:
    config = resolve_engine_config(
        model="M", device="cpu", enforce_eager=False, async_scheduling="False", quantization=None
    )
    assert config.notes == ()


def test_unknown_option_names_the_closest() -> None:
    assert "did you mean 'max_num_seqs'" in refused("max_num_seq", model="M", max_num_seq=3)
    refused("speculative_config", model="M", speculative_confg={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_model_len", "long"),
        ("block_size", 0),
        ("num_kv_blocks", -1),
        ("num_kv_blocks", 1 << 31),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("dtype", "int3"),
        ("device", "tpu"),
        ("seed", -1),
        ("enable_prefix_caching", "maybe"),
        ("cudagraph_capture_sizes", 5),
        ("cudagraph_capture_sizes", [0]),
        ("compilation_config", "{"),
        ("speculative_config", "{method: ngram}"),
        ("speculative_config", 5),
        ("speculative_config", [3]),
        ("model", ""),
        ("distributed_executor_backend", "external_launcher"),
        ("pipeline_parallel_size", 2),
        ("tokenizer", 3),
    ],
)
def test_bad_values_name_the_field(name: str, value: object) -> None:
    refused(name, **{"model": "M", "device": "cpu", name: value})


def test_contradictions() -> None:
    refused(
        "num_kv_blocks", "kv_cache_memory", model="M", device="cpu", num_kv_blocks=8, kv_cache_memory=1 << 20
    )
    refused("max_num_batched_tokens", model="M", device="cpu", max_num_batched_tokens=8, max_num_seqs=16)
    refused("kv_cache_memory", model="M", device="cpu", kv_cache_memory=1, kv_cache_memory_bytes=2)
    refused("skip_tokenizer_init", model="M", device="cpu", tokenizer="T", skip_tokenizer_init=True)


def test_a_small_token_budget_lowers_the_default_batch() -> None:
    assert resolve_engine_config(model="M", device="cpu", max_num_batched_tokens=16).max_num_seqs == 16


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32k", 32_000),
        ("32K", 32_768),
        ("2GiB", 2 << 30),
        ("512MB", 512_000_000),
        ("1.5GiB", 3 << 29),
        (7, 7),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert resolve_engine_config(model="M", device="cpu", kv_cache_memory=text).kv_cache_memory == size


def test_dtypes_and_paths() -> None:
    import torch

    assert resolve_engine_config(model="M", device="cpu", dtype=torch.bfloat16).dtype == "bfloat16"
    assert resolve_engine_config(model="M", device=torch.device("cpu"), dtype="half").dtype == "float16"
    assert resolve_engine_config(model=Path("/m"), device="cpu").model == "/m"


def test_aliases() -> None:
    assert resolve_engine_config(model="M", device="cpu", num_gpu_blocks_override=32).num_kv_blocks == 32
    assert (
        resolve_engine_config(model="M", device="cpu", kv_cache_memory_bytes="1GiB").kv_cache_memory
        == 1 << 30
    )


def test_cuda_where_there_is_none() -> None:
    import torch

    if torch.cuda.is_available():
        assert resolve_engine_config(model="M").device == "cuda"
        assert resolve_engine_config(model="M").max_num_seqs == 256
    else:
        assert resolve_engine_config(model="M").device == "cpu"
        refused("cuda", model="M", device="cuda")


@pytest.mark.parametrize("name", ["x" * 300, "~nobody of this name/model", "a\0b"])
def test_paths_that_nobody_can_look_at(name: str) -> None:
    refused("model: ", "cannot be looked at", model=name)
    refused(
        "speculative_config.model: ",
        "cannot be looked at",
        model="M",
        speculative_config={"method": "draft_model", "model": name, "num_speculative_tokens": 2},
    )


def test_config_checks_itself() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        EngineConfig(model="M", block_size=0)


def test_importing_config_needs_no_torch() -> None:
    code = (
        "import sys, draftwise.config as c; "
        "c.resolve_engine_config(model='M', device='cpu', speculative_config={'method': 'ngram'}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_speculation_is_controlled_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTWISE_SPECULATION_CONTROL", raising=False)
    assert resolve_engine_config(device="cpu").speculation_control == "adaptive"
    monkeypatch.setenv("DRAFTWISE_SPECULATION_CONTROL", "static")
    assert resolve_engine_config(device="cpu").speculation_control == "static"
    assert resolve_engine_config(speculation_control="adaptive").speculation_control == "adaptive"
    with pytest.raises(ConfigError, match=r"speculation_control: .*static"):
        resolve_engine_config(speculation_control="statc")
