"""Loading: what fits is loaded exactly, and everything else is an error that names what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.architectures import save, small
from torch import Tensor

from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels import torch_ops
from draftwise.kernels.torch_ops import TorchOps
from draftwise.models import checkpoint
from draftwise.models.loader import checkpoint_num_parameters, load_config, load_model
from draftwise.models.paths import resolve_path
from draftwise.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (hidden, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, hidden),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A model folder; a config change to None removes the field."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors if tensors is not None else tensors_of(CONFIG), folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """On plain torch, whose packed weights can be looked into."""
    chosen = dtype or getattr(torch, load_config(folder).dtype or "float32", torch.float32)
    return load_model(str(folder), dtype=dtype, device=CPU, ops=TorchOps(chosen, CPU), **options)


def fails(call: Callable[[], object], *parts: str) -> None:
    """The call raises ModelLoadError, which is a ValueError, with every part in its message."""
    with pytest.raises(ModelLoadError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    assert "\n" not in str(caught.value)


def weight_of(linear: Any) -> Tensor:
    """The [out, in] weight of a packed linear layer."""
    weight = linear.weight_t.T if linear.packed is None else linear.packed.to_dense()
    assert isinstance(weight, Tensor)
    return weight


# ------------------------------------------------------------------------------------------- what fits


def test_every_tensor_arrives_in_its_place(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    model = load(write(tmp_path))
    layer = model._layers[1]
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    packed = torch.cat([tensors[f"model.layers.1.{name}.weight"] for name in names])
    assert torch.equal(weight_of(layer.qkv), packed)
    packed = torch.cat([tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(weight_of(layer.mlp.gate_up), packed)
    assert torch.equal(weight_of(layer.mlp.down), tensors["model.layers.1.mlp.down_proj.weight"])
    torch.testing.assert_close(model._final_norm.scaled[0] / 4, tensors["model.norm.weight"])  # sqrt(16)
    assert torch.equal(weight_of(model._head), tensors["lm_head.weight"])
    assert model.weight_bytes() == sum(tensor.numel() * 4 for tensor in tensors.values())
    assert checkpoint_num_parameters(tmp_path) == sum(tensor.numel() for tensor in tensors.values())


def test_an_index_with_several_files(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    write(tmp_path)
    whole = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{i % 3}-of-3.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    model = load(tmp_path)
    for ours, theirs in zip(model._layers, whole._layers, strict=True):
        assert torch.equal(weight_of(ours.qkv), weight_of(theirs.qkv))
        assert torch.equal(weight_of(ours.mlp.down), weight_of(theirs.mlp.down))

    (tmp_path / "model-1-of-3.safetensors").unlink()
    fails(lambda: load(tmp_path), "model-1-of-3.safetensors", "missing")
    save_file({}, tmp_path / "model-1-of-3.safetensors")
    fails(
        lambda: load(tmp_path), "not where it says", next(n for n in names if files[n].startswith("model-1"))
    )
    index.write_text("{")
    fails(lambda: load(tmp_path), str(index))


@pytest.mark.parametrize(
    "file", ["../other/model.safetensors", "/other/model.safetensors", "a/model.safetensors"]
)
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, file: str) -> None:
    """Whoever wrote it must not choose what is read of the machine."""
    (tmp_path / "other").mkdir()
    write(tmp_path / "other")
    folder = tmp_path / "model"
    folder.mkdir()
    (write(folder) / "model.safetensors").unlink()
    files = dict.fromkeys(tensors_of(CONFIG), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    fails(lambda: load(folder), "names files that are not in its folder", file)


def test_pieces_smaller_than_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying row by row, with the file mapped anew all the time, gives the same weights."""
    folder = write(tmp_path)
    whole = load(folder)
    monkeypatch.setattr(checkpoint, "_WINDOW_BYTES", 100)
    pieces = load(folder)
    assert torch.equal(pieces._embedding, whole._embedding)
    for ours, theirs in zip(pieces._layers, whole._layers, strict=True):
        assert torch.equal(weight_of(ours.qkv), weight_of(theirs.qkv))
        assert torch.equal(weight_of(ours.mlp.gate_up), weight_of(theirs.mlp.gate_up))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_what_is_asked_else_what_config_says(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(CONFIG).items()}
    folder = write(tmp_path, tensors, torch_dtype=..., dtype=str(stored).removeprefix("torch."))
    model = load(folder, asked)
    wanted = asked or stored
    assert model.dtype is wanted
    assert torch.equal(model._embedding, tensors["model.embed_tokens.weight"].to(wanted))


def test_tied_output_layer_is_the_embedding_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(CONFIG)
    untied = load(write(tmp_path))
    tied_copy = load(write(tmp_path, tensors, tie_word_embeddings=True))  # stored twice: harmless
    del tensors["lm_head.weight"]
    tied = load(write(tmp_path, tensors, tie_word_embeddings=True))
    for model in (tied, tied_copy):
        assert torch.equal(weight_of(model._head), model._embedding)
        assert untied.weight_bytes() == model.weight_bytes(), "kernels keep a packed copy of a small table"
    monkeypatch.setattr(torch_ops, "_TIED_PACKED", 0)
    shared = load(write(tmp_path, tensors, tie_word_embeddings=True))
    assert untied.weight_bytes() - shared.weight_bytes() == 50 * 16 * 4
    fails(lambda: load(write(tmp_path, tensors)), "missing", "lm_head.weight")


def test_recomputed_buffers_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    load(write(tmp_path, tensors_of(CONFIG) | extra))


def test_so_are_those_of_latent_attention(tmp_path: Path) -> None:
    save(small("deepseek_v3"), tmp_path)
    tensors = {name: x.clone() for name, x in load_file(tmp_path / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)


def test_end_tokens_come_from_both_configs(tmp_path: Path) -> None:
    folder = write(tmp_path, eos_token_id=2)
    assert load_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load_config(folder).eos_token_ids == (2, 7, 9)
    write(tmp_path, eos_token_id=None)
    assert load_config(folder).eos_token_ids == (7, 2, 9)
    assert load_config(folder).bos_token_id == 1


# ------------------------------------------------------------------------------------ tensors that do not


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    fails(lambda: load(write(tmp_path, tensors)), "model.layers.1.mlp.up_proj.weight", "model.norm.weight")


def test_surplus_tensors_are_named(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}
    fails(lambda: load(write(tmp_path, tensors)), "does not have", "model.layers.0.self_attn.q_proj.bias")
    fails(lambda: load(write(tmp_path, num_hidden_layers=1)), "model.layers.1.", "and 1 more")


def test_shape_mismatch_names_both_shapes(tmp_path: Path) -> None:
    fails(
        lambda: load(write(tmp_path, num_key_value_heads=4)),
        "model.layers.0.self_attn.k_proj.weight",
        "[8, 16]",
        "[16, 16]",
    )


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["lm_head.weight"] = torch.zeros(50, 16, dtype=torch.int8)
    fails(lambda: load(write(tmp_path, tensors)), "I8", "lm_head.weight")


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = write(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    fails(lambda: load(folder), str(path), "truncated or damaged")


# -------------------------------------------------------------------------------------- folders that do not


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    fails(lambda: load(tmp_path), "config.json is missing", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    fails(lambda: load(tmp_path), "no weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    fails(lambda: load(tmp_path), "pytorch_model.bin", "convert")
    (tmp_path / "other.safetensors").write_bytes(b"x")
    fails(lambda: load(tmp_path), "other.safetensors", "neither")
    (tmp_path / "config.json").write_text("[]")
    fails(lambda: load(tmp_path), "JSON object")


def denied() -> NoReturn:
    raise PermissionError(13, "Permission denied")


def test_paths_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(lambda: load(tmp_path / "nowhere"), "does not exist")
    fails(lambda: resolve_path("./nowhere"), "does not exist")
    with (
        monkeypatch.context() as patched
    ):  # permissions do not bind root, so a file that cannot be opened is pretended
        patched.setattr(Path, "open", lambda *_: denied())
        (tmp_path / "secret").touch()
        fails(lambda: resolve_path(tmp_path / "secret"), "secret cannot be read: Permission denied")
    with monkeypatch.context() as patched:  # nor may one look into a folder of others
        patched.setattr(os, "stat", lambda *_, **__: denied())
        fails(lambda: resolve_path(tmp_path / "others"), "others' cannot be looked at: Permission denied")
    fails(lambda: resolve_path(""), "empty")
    fails(lambda: resolve_path(tmp_path / ("x" * 300)), "cannot be looked at: File name too long")
    fails(lambda: resolve_path("~nobody of this name/model"), "cannot be looked at")
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"")
    fails(lambda: load(file), "is a file")
    fails(lambda: load(write(tmp_path), revision="main"), "revision 'main'", "local folder")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fails(
        lambda: load(Path("no-such-owner/no-such-model")), "no-such-owner/no-such-model", "not a local folder"
    )


def test_a_hub_id_is_asked_for_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_path("owner/name", "v1") == tmp_path
    resolve_path("owner/name", weights=False, code=True)
    (name, full), (_, light) = asked
    assert (name, full["revision"], light["revision"]) == ("owner/name", "v1", None)
    assert "*.safetensors" in full["allow_patterns"] and "*.py" not in full["allow_patterns"]
    assert "*.safetensors" not in light["allow_patterns"] and "*.py" in light["allow_patterns"]
    assert "consolidated*" in full["ignore_patterns"]


def test_unknown_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    folder = write(tmp_path, architectures=["OtherForCausalLM"])
    fails(lambda: load(folder), "OtherForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
    write(tmp_path, architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.Model"})
    fails(lambda: load(folder, trust_remote_code=True), "OwnForCausalLM", "never run")
    write(tmp_path, architectures=...)
    fails(lambda: load(folder), "architectures")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["SeesForConditionalGeneration"], "vision_config": {}}, ("multimodal", "SeesForCond")),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, ("M-RoPE",)),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, ("M-RoPE",)),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, ("proportional", "llama3")),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 0.0]}}, ("short_factor", "positive")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("factor",)),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ("factor", "'2'")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("layer type",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ("quantised", "bitsandbytes", "awq")),
        ({"hidden_act": "gelu"}, ("activation", "gelu")),
        ({"hidden_size": ...}, ("hidden_size",)),
        ({"hidden_size": "16"}, ("hidden_size", "'16'")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads",)),
        ({"hidden_size": 18}, ("hidden_size 18",)),
        ({"head_dim": 5}, ("even head_dim",)),
        ({"torch_dtype": "float8"}, ("float8", "bfloat16")),
        ({"eos_token_id": "end"}, ("eos_token_id",)),
        ({"rms_norm_eps": "small"}, ("rms_norm_eps",)),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"num_hidden_layers": 10**7}, ("10000000 layers", "21 tensors")),
        ({"max_position_embeddings": 10**15}, ("rotations of 1000000000000000 positions", "max_model_len")),
        ({"architectures": "LlamaForCausalLM"}, ("architectures",)),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["odd", "odd"]}, ("odd",)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, (dict, tuple)) else None,
)  # fmt: skip
def test_unsupported_settings_are_named(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    fails(lambda: load(write(tmp_path, **changes)), str(tmp_path), *parts)


def test_model_length(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert load_config(folder).max_model_len == 64
    assert load(folder, max_model_len=20).config.max_model_len == 20
    with pytest.raises(ConfigError, match="65 is out of range: this model reaches 1 to 64"):
        load_config(folder, max_model_len=65)
    with pytest.raises(ConfigError, match="max_model_len: 0"):
        load_config(folder, max_model_len=0)
    for kind in ("linear", "dynamic"):
        write(tmp_path, rope_scaling={"type": kind, "factor": 2.5})
        assert load_config(folder).max_model_len == 64
        assert load_config(folder, max_model_len=160).max_model_len == 160
        with pytest.raises(ConfigError, match="160"):
            load_config(folder, max_model_len=161)


def test_mistral_without_the_field_slides_by_4096(tmp_path: Path) -> None:
    folder = write(tmp_path, architectures=["MistralForCausalLM"])
    assert load_config(folder).sliding_window == (4096, 4096)
    write(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None)
    assert load_config(folder).sliding_window == (None, None)


# ---------------------------------------------------------------------------------------------- tokenizer


def test_tokenizer_errors(tmp_path: Path) -> None:
    fails(lambda: load_tokenizer(str(tmp_path / "nowhere")), "does not exist")
    fails(lambda: load_tokenizer(str(write(tmp_path))), "tokenizer", str(tmp_path))


def test_tokenizer_is_loaded(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.is_fast
    assert tokenizer.encode("b") == [1]


def test_embedded_models_that_are_not_there() -> None:
    fails(lambda: embedded_path("nothing"), "nothing", "not in this installation")


# ------------------------------------------------------------------------------------------------- memory

_MEASURE = """
import re, sys, torch
from draftwise.models.loader import load_model
import safetensors.torch
def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
torch.ones(100, 100) @ torch.ones(100, 100)
before = status("VmRSS")
model = load_model(sys.argv[1], dtype=getattr(torch, sys.argv[2]), device=torch.device("cpu"))
print(status("VmHWM") - before, model.weight_bytes())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_loading_takes_at_most_a_fifth_more_than_the_weights(tmp_path: Path, dtype: str) -> None:
    """Peak resident memory of a fresh process, pages of the mapped file included."""
    config = CONFIG | {
        "vocab_size": 8000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 6,
    }
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors_of(config).items()}
    write(tmp_path, stored, **config)
    del stored
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), dtype], capture_output=True, text=True, check=True
    )
    peak, weights = map(int, result.stdout.split())
    assert weights > 140e6
    assert 0.9 * weights < peak < 1.2 * weights


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As Mistral-Small-3.1 has it, and other models of text and images."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(str(embedded_path("target"))) / name, tmp_path)
    raw = json.loads((tmp_path / "tokenizer_config.json").read_text())
    raw.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(raw))
    assert not load_tokenizer(str(tmp_path)).chat_template
    (tmp_path / "chat_template.json").write_text(
        json.dumps({"chat_template": "{{ messages[0]['content'] }}"})
    )
    messages = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(str(tmp_path)).apply_chat_template(messages, tokenize=False) == "hi"


def test_a_tokenizer_neither_cuts_nor_pads(tmp_path: Path) -> None:
    """As its file may say, and as the first call would switch off, in whichever thread."""
    from tokenizers import Tokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(str(embedded_path("target"))) / name, tmp_path / name)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=16)
    saved.save(str(tmp_path / "tokenizer.json"))
    backend = load_tokenizer(str(tmp_path)).backend_tokenizer
    assert backend.truncation is None and backend.padding is None
