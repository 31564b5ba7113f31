"""GGUF files load to exactly what they stand for, their tokenizer splits as the original's, and broken ones say so."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.fakes.gguf import CODES, convert, encode, write_gguf
from tests.fakes.tiny import save_llama
from tests.native import native_or_skip
from torch import Tensor

from draftwise import LLM, SamplingParams
from draftwise.cli import main
from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.gguf import blocks
from draftwise.models.gguf.reader import read_gguf
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_config, load_model
from draftwise.models.tokenizer import load_tokenizer
from draftwise.quantization.weights import QuantizedWeight, stack_rows

CPU = torch.device("cpu")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def logits(model: DecoderModel, tokens: list[int]) -> Tensor:
    kv = KVStorage(model.kv_layout(), 4, 16, model.dtype, CPU)
    batch = build_step_input([RowInput(tokens, 0, torch.arange(4, dtype=torch.int32).numpy())], 16, CPU)
    with torch.inference_mode():
        return model.forward_logits(batch, kv)[1]


def on_torch(path: Path) -> DecoderModel:
    return load_model(path, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))


def meant(folder: Path, weights: dict[str, Tensor], target: Path) -> Path:
    """A float32 folder of the weights that a file stands for."""
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    save_file({name: value.contiguous() for name, value in weights.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_every_type_are_read_exactly(kind: str) -> None:
    torch.manual_seed(1)
    data, stands = encode(torch.randn(6, 512) * 0.1, kind)
    found = blocks.block_type(CODES[kind])
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(6, -1)
    assert raw.shape[1] == 512 // found.numbers * found.size
    torch.testing.assert_close(blocks.values_of(raw, found).float(), stands, rtol=1e-6, atol=1e-9)
    if kind in blocks.KEPT:
        kept = blocks.codes_of(raw, found)
        torch.testing.assert_close(kept.dequantize(), stands, rtol=1e-6, atol=0)
        both = stack_rows([kept, kept])
        assert torch.equal(both.dequantize(), torch.cat([kept.dequantize()] * 2))
        if kind != "Q4_0":
            wide = kept.doubled()
            left, right = wide.dequantize().double().chunk(2, 1)
            torch.testing.assert_close(left + right, stands.double(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_llama_of_every_type(kind: str, tmp_path: Path) -> None:
    sizes = {**WIDE, "hidden_size": 256, "intermediate_size": 256} if kind.endswith("K") else WIDE
    folder = Path(save_llama(tmp_path / "model", seed=1, **sizes, num_hidden_layers=1))
    weights = convert(folder, tmp_path / "model.gguf", "llama", kind)
    expected = on_torch(meant(folder, weights, tmp_path / "meant"))
    tokens = [3, 7, 11, 2, 60, 5, 9]
    found = on_torch(tmp_path / "model.gguf")
    torch.testing.assert_close(logits(found, tokens), logits(expected, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_native_kernels_keep_the_codes(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    native_or_skip()
    folder = Path(save_llama(tmp_path / "model", seed=2, **WIDE))
    weights = convert(folder, tmp_path / "model.gguf", "llama", kind)
    expected = on_torch(meant(folder, weights, tmp_path / "meant"))
    found = load_model(tmp_path / "model.gguf", dtype=torch.bfloat16, device=CPU)
    tokens = list(range(3, 33))
    want, got = logits(expected, tokens), logits(found, tokens)
    assert float((got - want).abs().mean() / want.std()) < 0.02
    assert torch.equal(logits(found, tokens)[:7], logits(found, tokens[:7])), "a row's bits are its own"
    plain = load_model(folder, dtype=torch.bfloat16, device=CPU)
    assert found.weight_bytes() < plain.weight_bytes()


def test_types_may_be_mixed_in_one_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in files that llama.cpp makes: v and down with more bits. What is stacked of unlike parts becomes floats."""
    folder = Path(
        save_llama(tmp_path / "model", seed=3, **{**WIDE, "hidden_size": 256, "intermediate_size": 256})
    )
    weights = convert(
        folder, tmp_path / "m.gguf", "llama", "Q4_0", kinds={"attn_v": "Q6_K", "ffn_down": "Q4_1"}
    )
    expected = on_torch(meant(folder, weights, tmp_path / "meant"))
    with caplog.at_level(logging.INFO):
        found = on_torch(tmp_path / "m.gguf")
    assert "tensors of type Q6_K are read as floats" in caplog.text
    torch.testing.assert_close(logits(found, [5, 6, 7]), logits(expected, [5, 6, 7]), rtol=1e-4, atol=1e-4)


BASE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3moe": (
        "qwen3_moe",
        {
            "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma": ("gemma", {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}, {}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
        {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "num_hidden_layers": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
        {"attention.sliding_window": 16, "rope.freq_base": 1000000.0},
    ),
    "phi3": ("phi3", {"pad_token_id": 0}, {"rope.dimension_count": 16}),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(name: str, tmp_path: Path) -> None:
    kind, settings, metadata = FAMILIES[name]
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(kind, **(BASE | settings))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases are made of ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "model")
    convert(
        tmp_path / "model", tmp_path / "m.gguf", name, "F32", {f"{name}.{k}": v for k, v in metadata.items()}
    )
    tokens = [3, 7, 11, 2, 60, 5, 9, 3, 3, 8] * 3  # past the windows
    expected = model(torch.tensor([tokens])).logits[0].detach()
    torch.testing.assert_close(logits(on_torch(tmp_path / "m.gguf"), tokens), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gemma", "starcoder2", "phi3"])
def test_other_families_keep_codes(name: str, tmp_path: Path) -> None:
    """Also those that are put together from what Transformers' code does."""
    native_or_skip()
    kind, settings, metadata = FAMILIES[name]
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(kind, **(BASE | settings))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    more = {f"{name}.{k}": v for k, v in metadata.items()}
    weights = convert(tmp_path / "model", tmp_path / "m.gguf", name, "Q4_0", more)
    expected = on_torch(meant(tmp_path / "model", weights, tmp_path / "meant"))
    tokens = [3, 7, 11, 2, 60, 5, 9, 3, 3, 8]
    wanted = logits(expected, tokens)
    torch.testing.assert_close(logits(on_torch(tmp_path / "m.gguf"), tokens), wanted, rtol=1e-4, atol=1e-4)
    found = load_model(tmp_path / "m.gguf", dtype=torch.bfloat16, device=CPU)
    assert float((logits(found, tokens) - wanted).abs().mean() / wanted.std()) < 0.05
    plain = load_model(tmp_path / "model", dtype=torch.bfloat16, device=CPU)
    assert found.weight_bytes() < 0.8 * plain.weight_bytes()


def test_rotations_of_llama_3_come_from_their_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    folder = Path(
        save_llama(
            tmp_path / "model", seed=5, **WIDE, rope_parameters=scaling, max_position_embeddings=131072
        )
    )
    weights = convert(folder, tmp_path / "plain.gguf", "llama", "F32")
    config = load_config(folder)
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = plain / config.rope.inv_freq()
    assert divisors.min() == pytest.approx(1.0) and divisors.max() == pytest.approx(8.0)
    file = read_gguf(tmp_path / "plain.gguf")
    tensors = {
        name: (blocks.values_of(t.read(0, t.rows), t.kind).view(t.shape), "F32")
        for name, t in file.tensors.items()
    }
    write_gguf(tmp_path / "m.gguf", file.metadata, {**tensors, "rope_freqs.weight": (divisors, "F32")})
    assert load_config(tmp_path / "m.gguf").rope.inv_freq().tolist() == pytest.approx(
        config.rope.inv_freq().tolist()
    )
    write_gguf(
        tmp_path / "odd.gguf", file.metadata, {**tensors, "rope_freqs.weight": (divisors * 1.5, "F32")}
    )
    with pytest.raises(ModelLoadError, match="not those of Llama 3's scaling"):
        load_config(tmp_path / "odd.gguf")
    assert weights


# ------------------------------------------------------------------------------------------------- whole engines


def test_text_is_the_folders_with_and_without_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same weights, a drafter from a GGUF file, by the Python interface and the commands."""
    folder = Path(save_llama(tmp_path / "model", seed=6, **WIDE))
    (tmp_path / "gguf").mkdir()
    convert(folder, tmp_path / "gguf" / "m.gguf", "llama", "F32")
    convert(folder, tmp_path / "d.gguf", "llama", "Q8_0")
    prompts = [{"prompt_token_ids": [3, 4, 5, 6]}, {"prompt_token_ids": [9] * 20}]
    texts = []
    for model, drafter in (
        (folder, None),
        (tmp_path / "gguf" / "m.gguf", None),
        (tmp_path / "gguf", str(tmp_path / "d.gguf")),
    ):
        config = None if drafter is None else {"model": drafter, "num_speculative_tokens": 3}
        with LLM(
            str(model),
            skip_tokenizer_init=True,
            speculative_config=config,
            num_kv_blocks=32,
            num_threads=1,
            speculation_control="static",
        ) as llm:
            outputs = llm.generate(prompts, GREEDY)
            texts.append([output.outputs[0].token_ids for output in outputs])
            if drafter is not None:
                accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
                assert accepted > 10, "the target's own weights, rounded, are a good drafter"
    assert texts[0] == texts[1] == texts[2]
    assert main.main(["show", str(tmp_path / "d.gguf"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["quantized"] == "GGUF Q8_0, F32" and shown["way"] == "own" and shown["refused"] is None


def test_kept_codes_give_the_same_bits_with_and_without_drafts(tmp_path: Path) -> None:
    native_or_skip()
    folder = Path(save_llama(tmp_path / "model", seed=7, **WIDE))
    convert(folder, tmp_path / "m.gguf", "llama", "Q8_0", kinds={"ffn_down": "Q4_1", "attn_output": "Q4_0"})
    texts = []
    for method in ("none", "ngram"):
        with LLM(
            str(tmp_path / "m.gguf"), skip_tokenizer_init=True, speculative_method=method, num_kv_blocks=32,
            num_threads=1, speculation_control="static",
        ) as llm:  # fmt: skip
            assert llm.guarantees.same_bits
            texts.append(
                [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": [3, 4] * 8}], GREEDY)]
            )
    assert texts[0] == texts[1]


def test_floats_of_a_file_are_rounded_when_asked(tmp_path: Path) -> None:
    native_or_skip()
    folder = Path(save_llama(tmp_path / "model", seed=8, **WIDE))
    convert(folder, tmp_path / "m.gguf", "llama", "F16")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "quantization": "int8"}
    direct = load_model(tmp_path / "m.gguf", **options)
    kept = load_model(tmp_path / "m.gguf", **options, quantization_cache=tmp_path / "cache")
    again = load_model(tmp_path / "m.gguf", **options, quantization_cache=tmp_path / "cache")
    tokens = [4, 5, 6]
    assert torch.equal(logits(direct, tokens), logits(kept, tokens))
    assert torch.equal(logits(direct, tokens), logits(again, tokens))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_codes_meet_rounded_rows_when_asked(tmp_path: Path) -> None:
    native_or_skip()
    folder = Path(save_llama(tmp_path / "model", seed=9, **WIDE))
    weights = convert(folder, tmp_path / "m.gguf", "llama", "Q8_0")
    expected = logits(on_torch(meant(folder, weights, tmp_path / "meant")), list(range(3, 23)))
    found = load_model(tmp_path / "m.gguf", dtype=torch.float32, device=CPU, quantization="int8")
    got = logits(found, list(range(3, 23)))
    assert 0 < float((got - expected).abs().mean() / expected.std()) < 0.05
    with pytest.raises(ConfigError, match="fp8"):
        load_model(tmp_path / "m.gguf", dtype=torch.bfloat16, device=CPU, quantization="fp8")


_MEASURE = """
import sys, torch
from pathlib import Path
from draftwise.models.loader import load_config, load_model
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
warm = load_model(sys.argv[1], dtype=torch.bfloat16, device=torch.device("cpu"))  # imports, buffers of torch
del warm
torch.ones(100, 100) @ torch.ones(100, 100)
before = status("VmRSS")
model = load_model(sys.argv[2], dtype=torch.bfloat16, device=torch.device("cpu"))
print(status("VmHWM") - before, model.weight_bytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_loading_takes_at_most_a_fifth_more_than_the_weights(kind: str, tmp_path: Path) -> None:
    native_or_skip()
    sizes = {"vocab_size": 2000, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16}
    small = Path(save_llama(tmp_path / "small", seed=1, **WIDE))
    large = Path(
        save_llama(tmp_path / "large", seed=1, **sizes, num_hidden_layers=20, torch_dtype="bfloat16")
    )
    convert(small, tmp_path / "small.gguf", "llama", kind)
    convert(large, tmp_path / "large.gguf", "llama", kind)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MEASURE, str(tmp_path / "small.gguf"), str(tmp_path / "large.gguf")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, weights = map(int, result.stdout.split())
    assert weights > 100e6
    assert peak < 1.2 * weights


# ----------------------------------------------------------------------------------------------------- tokenizers


def tokenizer_fields(folder: Path) -> dict[str, Any]:
    """What llama.cpp's converter takes from a byte-level tokenizer.json."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {**raw["model"]["vocab"], **{t["content"]: t["id"] for t in raw["added_tokens"]}}
    control = {t["content"] for t in raw["added_tokens"] if t["special"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]],
    }


def test_a_byte_level_tokenizer_splits_as_the_original(tmp_path: Path) -> None:
    folder = Path(str(embedded_path("target")))
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.json").write_text(json.dumps(raw))
    shutil.copy(folder / "tokenizer_config.json", tmp_path / "original")
    original = load_tokenizer(str(tmp_path / "original"))
    fields = tokenizer_fields(folder) | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}",
    }
    convert(folder, tmp_path / "m.gguf", "llama", "BF16", fields)
    found = load_tokenizer(str(tmp_path / "m.gguf"))
    for text in ("def main(argv):\n    return 0", "naïve  café 漢字\t12345", "x" * 50):
        ids = original.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.encode(text) == [0, *ids]
        assert found.decode(ids) == text
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"
    with LLM(str(tmp_path / "m.gguf"), num_kv_blocks=16, num_threads=1, speculation_control="static") as llm:
        assert llm.generate("def main(", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text


def test_a_sentencepiece_tokenizer_splits_by_scores(tmp_path: Path) -> None:
    """Pieces with scores, bytes for what has no piece, and a first token by default."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "h", "i", "\u2581h", "\u2581hi", "o"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0, -6.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    folder = Path(save_llama(tmp_path / "model", seed=1, vocab_size=len(pieces)))
    convert(folder, tmp_path / "m.gguf", "llama", "F32", metadata)
    found = load_tokenizer(str(tmp_path / "m.gguf"))
    assert found.convert_ids_to_tokens(found.encode("hi ho")) == ["<s>", "\u2581hi", "\u2581h", "o"]
    assert found.convert_ids_to_tokens(found.encode("\u00e9", add_special_tokens=False))[-2:] == [
        "<0xC3>",
        "<0xA9>",
    ]
    assert found.decode(found.encode("hi ho", add_special_tokens=False)) == "hi ho"


def test_ends_of_turns_are_known_by_their_text(tmp_path: Path) -> None:
    """Files of Phi-3 name the end of a text alone; ``<|end|>`` ends a turn there."""
    tokens = ["<unk>", "<s>", "<|endoftext|>", "<|end|>", "a", "b"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 2}
    folder = Path(save_llama(tmp_path / "model", seed=1, vocab_size=len(tokens)))
    convert(folder, tmp_path / "m.gguf", "llama", "F32", metadata)
    assert load_config(tmp_path / "m.gguf").eos_token_ids == (2, 3)


def test_a_file_without_tokenizer_says_so(tmp_path: Path) -> None:
    folder = Path(save_llama(tmp_path / "model", seed=1))
    convert(folder, tmp_path / "m.gguf", "llama", "F32")
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path / "m.gguf"))
    convert(folder, tmp_path / "odd.gguf", "llama", "F32", {
        "tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a", "b"],
    })  # fmt: skip
    with pytest.raises(ModelLoadError, match="its tokenizer cannot be made"):
        load_tokenizer(str(tmp_path / "odd.gguf"))


# --------------------------------------------------------------------------------------------------- broken files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    folder = Path(save_llama(root / "model", seed=1, num_hidden_layers=1, intermediate_size=64))
    convert(folder, root / "m.gguf", "llama", "Q8_0", {"tokenizer.ggml.tokens": ["a", "b", "c"]})
    return root / "m.gguf"


def load(path: Path) -> DecoderModel:
    return on_torch(path)


def test_every_truncation_is_named(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    for count in [*range(4, 200), *range(200, len(data) - 32, 611)]:
        (tmp_path / "cut.gguf").write_bytes(data[:count])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            load(tmp_path / "cut.gguf")


def test_flipped_bytes_of_a_header_end_in_an_error_or_a_model(whole: Path, tmp_path: Path) -> None:
    """Whatever a header says, there is no other exception, and nothing is allocated that the file cannot hold."""
    data = whole.read_bytes()
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        place = int(torch.randint(0, 1500, (), generator=generator))
        changed = bytearray(data)
        changed[place] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        (tmp_path / "odd.gguf").write_bytes(bytes(changed))
        try:
            load(tmp_path / "odd.gguf")
        except ModelLoadError as error:
            assert "odd.gguf" in str(error)


def test_what_is_not_read_is_named(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    cases = {
        data[:4] + struct.pack("<I", 1) + data[8:]: "GGUF version 1; versions 2 and 3 are read",
        data[:4] + struct.pack(">I", 3) + data[8:]: "the other byte order",
        b"GGML" + data[4:]: "is not a GGUF file",
        data.replace(
            b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00grokk"
        ): "'grokk'",
        data.replace(b"blk.0.attn_q", b"blk.0.attn_x"): "attn_x.weight is not one of 'llama'",
        data.replace(
            b"blk.0.attn_q", b"blk.7.attn_q"
        ): "tensors are missing: model.layers.0.self_attn.q_proj.weight",
        data.replace(b"llama.block_count", b"llama.block_cound"): "metadata llama.block_count is missing",
    }
    for broken, words in cases.items():
        (tmp_path / "odd.gguf").write_bytes(broken)
        with pytest.raises(ModelLoadError, match=words):
            load(tmp_path / "odd.gguf")
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    (tmp_path / "odd.gguf").write_bytes(data[:at] + struct.pack("<I", 39) + data[at + 4 :])
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight: tensors of type 39 are not supported"):
        load(tmp_path / "odd.gguf")


def test_a_file_of_a_split_model_is_named(tmp_path: Path) -> None:
    """The first file may hold no tensors at all."""
    metadata = {"general.architecture": "llama", "split.count": 3, "split.no": 0}
    write_gguf(tmp_path / "m-00001-of-00003.gguf", metadata, {})
    with pytest.raises(ModelLoadError, match="one file of a split model"):
        load_config(tmp_path / "m-00001-of-00003.gguf")


def test_places_that_are_no_file_are_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(whole, tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"several GGUF files; name one: a\.gguf, b\.gguf"):
        load(tmp_path)
    with pytest.raises(ModelLoadError, match="revision 'main' was given"):
        load_model(whole, dtype=None, device=CPU, revision="main")
    assert main.main(["generate", "x", "--model", str(tmp_path / "c.gguf")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_wide_weight_is_two_of_four_bits() -> None:
    codes = torch.tensor([[-77] * 32], dtype=torch.int8)
    wide = QuantizedWeight(8, codes, torch.tensor([[2.0]]), None, 32).doubled()
    left, right = wide.dequantize().chunk(2, 1)
    assert left[0, 0] == 16 * 2 * -5 and right[0, 0] == 2 * 3
