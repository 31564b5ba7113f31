"""What is in memory while weights are read, rounded and packed: pieces, not whole layers of floats."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.fakes.architectures import save, small
from tests.fakes.quantized import write_pair
from tests.native import native_or_skip
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.linear import LinearKernels
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.select import default_ops
from draftwise.models.general import stored
from draftwise.models.general.stored import FloatLayer, MatrixOfStack, pack_stored
from draftwise.models.source import scan
from draftwise.quantization import weights
from draftwise.quantization.codes import scattered, unpacked
from draftwise.quantization.floats import Fp8BlockFormat
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import FP8, QuantizedWeight, quantize

CPU = torch.device("cpu")


def rounding(name: str) -> Ops:
    native_or_skip()
    return default_ops(torch.bfloat16, CPU, parse_scheme(name, device="cpu"))


def place_of(kernels: LinearKernels, layer: Any) -> int:
    data = native_or_skip().function("dw_linear_data", ctypes.c_void_p, [ctypes.c_void_p])
    found = data(layer.pointer)
    assert isinstance(found, int)
    return found


def test_layers_stacked_anew_stand_where_they_stood() -> None:
    """What q, k and v leave takes the three of them stacked, though something stands behind them."""
    ops = rounding("int4")
    assert isinstance(ops, NativeOps)
    kernels = ops._linear
    ops.release_freed()  # holes of tests before
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn((512, 256), generator=generator).bfloat16() for _ in range(3)]
    wanted = ops.linear(parts[0][:4], ops.pack_linear(torch.cat(parts)))
    ops.release_freed()
    packed = [ops.pack_linear(part) for part in parts]
    behind = ops.pack_linear(parts[1])
    of_behind = ops.linear(parts[0][:4], behind)
    first = place_of(kernels, packed[0])
    packed.clear()
    again = ops.pack_linear(torch.cat(parts))
    assert place_of(kernels, again) == first
    assert torch.equal(ops.linear(parts[0][:4], again), wanted)
    assert torch.equal(ops.linear(parts[0][:4], behind), of_behind)


def test_freed_memory_is_zeros_for_the_next() -> None:
    """A layer of fewer inputs than its units hold is padded with what it was given."""
    ops = rounding("int8")
    ops.release_freed()
    x = torch.randn((3, 67), generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = torch.randn((70, 67), generator=torch.Generator().manual_seed(3)).bfloat16()
    wanted = ops.linear(x, ops.pack_linear(weight))
    for _ in range(3):
        dirty = ops.pack_linear(torch.full((128, 256), 7.0).bfloat16())
        kept = ops.pack_linear(weight)
        del dirty
        assert torch.equal(ops.linear(x, ops.pack_linear(weight)), wanted)
        assert torch.equal(ops.linear(x, kept), wanted)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_layers_are_rounded_as_they_are_read(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = rounding(scheme)
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn((rows, 128), generator=generator).bfloat16() for rows in (96, 40))
    stack = torch.randn((3, 64, 128), generator=generator).bfloat16()
    save_file({"q.weight": q, "k.weight": k, "experts": stack}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    entries = scan(tmp_path)
    first, second = (
        FloatLayer(name, rows, 128, entries, torch.bfloat16) for name, rows in (("q", 96), ("k", 40))
    )
    matrix = MatrixOfStack("experts", 64, 128, entries, torch.bfloat16, index=2)
    turns = torch.cat((torch.arange(0, 96, 2), torch.arange(1, 96, 2)))
    cases = {
        "stacked": ([(first, None), (second, None)], torch.cat((q, k))),
        "in another order": ([(first, turns), (second, None)], torch.cat((q[turns], k))),
        "of a stack": ([(matrix, None)], stack[2]),
    }
    x = torch.randn((5, 128), generator=generator).bfloat16()
    wanted = {name: ops.linear(x, ops.pack_linear(weight)) for name, (_, weight) in cases.items()}
    monkeypatch.setattr(stored, "_WINDOW", 10 * 128)
    monkeypatch.setattr(weights, "_CHUNK", 3 * 128)
    read: list[int] = []
    for cls in (FloatLayer, MatrixOfStack):
        real = cls.rows

        def rows(self: FloatLayer, start: int, end: int, real: Any = real) -> Tensor:
            read.append(end - start)
            found: Tensor = real(self, start, end)
            return found

        monkeypatch.setattr(cls, "rows", rows)
        monkeypatch.setattr(cls, "floats", lambda self: pytest.fail("it is read as a whole"))
    for name, (layers, _) in cases.items():
        read.clear()
        assert torch.equal(ops.linear(x, pack_stored(ops, layers)), wanted[name]), name
        assert max(read) <= 20, name  # every other row of 10


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest result, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.nbytes)
        return out


@pytest.mark.parametrize("form", ["fp8 blocks", "act-order"])
def test_codes_become_floats_in_pieces(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn((64, 256), generator=generator)
    if form == "fp8 blocks":
        raw = {".weight": weight.to(FP8), ".scale": torch.rand((2, 8), generator=generator) + 0.5}
        found = Fp8BlockFormat(32, 32, ".scale").decode(raw, 64, 256)
        scales = raw[".scale"].repeat_interleave(32, 0).repeat_interleave(32, 1)
        wanted = (raw[".weight"].float() * scales).bfloat16()
    else:
        codes = torch.randint(0, 16, (64, 256), dtype=torch.uint8, generator=generator)
        zeros, steps = torch.full((64, 8), 8), torch.rand((64, 8), generator=generator)
        groups = torch.randint(0, 8, (256,), generator=generator)
        found = scattered(codes, steps, zeros, groups)
        wanted = ((codes.float() - 8) * steps[:, groups]).bfloat16()
    monkeypatch.setattr(weights, "_CHUNK", 2 * 256)
    with Sizes() as sizes:
        values = found.dequantize(torch.bfloat16)
    assert torch.equal(values, wanted)
    assert sizes.largest == values.nbytes  # nothing is as large as the result


def test_nibbles_are_unpacked_without_a_word_for_each() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (64, 32), generator=torch.Generator().manual_seed(6))
    words = words.to(torch.int32)
    wanted = {
        bits: torch.stack([(words >> (bits * i)) & (2**bits - 1) for i in range(32 // bits)], -1).to(
            torch.uint8
        )
        for bits in (4, 8)
    }
    for bits, want in wanted.items():
        with Sizes() as sizes:
            found = unpacked(words, bits)
        assert torch.equal(found, want)
        assert sizes.largest == max(found.nbytes, words.nbytes)


def test_what_is_read_is_rounded_as_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn((50, 130), generator=torch.Generator().manual_seed(7))
    for name in ("int8", "int4", "int4_g32"):
        whole = quantize(weight, parse_scheme(name))
        with monkeypatch.context() as patch:
            patch.setattr(weights, "_CHUNK", 7 * 130)
            pieces = quantize(weight, parse_scheme(name))
        assert torch.equal(whole.codes, pieces.codes) and torch.equal(whole.scales, pieces.scales)
        assert isinstance(pieces, QuantizedWeight)


_MEASURE = """
import sys, torch
from pathlib import Path
from draftwise.models.loader import load_model
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "quantization": sys.argv[3] or None}
warm = load_model(sys.argv[1], **options)  # imports, buffers of torch
del warm
torch.ones(100, 100) @ torch.ones(100, 100)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = load_model(sys.argv[2], **options)
print(status("VmHWM") - before, model.weight_bytes())
"""
_SIZES = {
    "vocab_size": 2000, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 96, "pad_token_id": None,
}  # fmt: skip
_GROUP = 128


def write_large(folder: Path, kind: str, form: str, num_layers: int) -> None:
    """28 million numbers in a layer. ``form``: "", "gptq" or "fp8 blocks"."""
    # Granite's default scale of attention is 1: many layers of random weights are then chaotic in bfloat16.
    more = {"attention_multiplier": _SIZES["head_dim"] ** -0.5} if kind == "granite" else {}
    config = transformers.AutoConfig.for_model(kind, **_SIZES, **more, num_hidden_layers=num_layers)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, shell in shapes.items():
        base = name.removesuffix(".weight")
        if shell.ndim == 1:
            tensors[name] = torch.ones(shell.shape, dtype=torch.bfloat16)
            continue
        outputs, inputs = shell.shape
        if form == "gptq" and "proj" in name:
            words = torch.empty((inputs // 8, outputs), dtype=torch.int32).random_(generator=generator)
            tensors[f"{base}.qweight"] = words
            tensors[f"{base}.qzeros"] = torch.full((inputs // _GROUP, outputs // 8), 0x77777777).to(
                torch.int32
            )
            tensors[f"{base}.scales"] = torch.full((inputs // _GROUP, outputs), 0.004, dtype=torch.float16)
            tensors[f"{base}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // _GROUP
            continue
        value = torch.empty(shell.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        if form == "fp8 blocks" and "proj" in name:
            tensors[name] = value.mul_(1000).to(FP8)
            tensors[f"{base}.weight_scale_inv"] = torch.full((-(-outputs // 128), -(-inputs // 128)), 1e-3)
        else:
            tensors[name] = value
    name = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    settings: dict[str, Any] = config.to_dict() | {"architectures": [name]}
    settings["dtype"] = "bfloat16"
    if form == "gptq":
        settings["quantization_config"] = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": _GROUP,
            "desc_act": False,
        }
    elif form:
        settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")


def peak_of(tmp_path: Path, kind: str, form: str, num_layers: int) -> tuple[int, int]:
    """Bytes that loading takes at its peak, and those of the weights; in a process of its own, which has loaded a small
    model before."""
    stored_as = form if form in ("gptq", "fp8 blocks") else ""
    if stored_as:
        first = write_pair(tmp_path / "few", kind, form).quantized
    else:
        first = tmp_path / "few"
        save(small(kind), first)
    write_large(tmp_path / "large", kind, stored_as, num_layers)
    places = [str(first), str(tmp_path / "large"), "" if stored_as else form]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MEASURE, *places], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    peak, weights = map(int, result.stdout.split())
    return peak, weights


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("form", ["", "int8", "int4", "gptq", "fp8 blocks"])
@pytest.mark.parametrize("kind", ["granite", "llama"])
def test_the_peak_of_loading_is_the_weights_and_one_layer(kind: str, form: str, tmp_path: Path) -> None:
    """Of a model that is put together, and of one with code of its own."""
    native_or_skip()
    few_bits = form in ("int4", "gptq")  # what does not grow with a model is a larger part of these
    peak, weights = peak_of(tmp_path, kind, form, 24 if few_bits else 14)
    assert weights > 300e6
    assert peak < 1.2 * weights
