"""Comparing a machine's kernels with plain torch: right ones pass, planted faults are found by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwise.cli.main import main
from draftwise.config.embedded import embedded_path
from draftwise.kernels.handles import Linear
from draftwise.kernels.select import default_ops
from draftwise.kernels.torch_ops import TorchOps
from draftwise.models.checking import KernelCheck, check_kernels
from draftwise.models.loader import load_config
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import QuantizedWeight

CPU = torch.device("cpu")
CONFIG = load_config(embedded_path("target"))


def wrong(checks: list[KernelCheck]) -> set[str]:
    return {check.name for check in checks if not check.right}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_runs_here_is_right(dtype: torch.dtype) -> None:
    checks = check_kernels(default_ops(dtype, CPU), CONFIG)
    assert wrong(checks) == set()
    names = {check.name for check in checks}
    assert {"linear, 1 rows", "attention, tree", "keys and values, written", "logits, 80 rows"} <= names
    assert max(check.apart for check in checks) > 0.0  # two ways of computing, not one compared with itself


class WrongTrees(TorchOps):
    """Takes trees for chains, as a kernel that does not look at masks would."""

    def attention(self, q: Tensor, kv: tuple[Tensor, ...], batch: Any, *rest: Any, **named: Any) -> Tensor:
        plain = replace(batch, is_tree_np=batch.is_tree_np & False, ancestors_np=None, cache={})
        return super().attention(q, kv, plain, *rest, **named)


class WrongRow(TorchOps):
    """One number of one row, in chunks alone. Plain torch's output layer is the same product."""

    def linear(self, x: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
        result = super().linear(x, weight, out)
        if len(result) == 80:
            result[79, 3] += 1.0
        return result


class NotANumber(TorchOps):
    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        result = super().silu_mul(gate_up, out)
        result[0, 0] = float("nan")
        return result


class DoesNotCompile(TorchOps):
    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Any, out: Tensor | None = None) -> Tensor:
        raise RuntimeError("Failed to find C compiler.\n  Please specify via CC")


class WrongSlot(TorchOps):
    """Keys and values go to the neighbour's place; queries are right."""

    def qkv_rope_write(
        self, qkv: Tensor, heads: Any, rope_rows: Tensor, kv: Any, slots: Tensor, *rest: Any, **named: Any
    ) -> Tensor:
        return super().qkv_rope_write(qkv, heads, rope_rows, kv, slots.flip(0), *rest, **named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (WrongTrees, {"attention, tree"}),
        (WrongRow, {"linear, 80 rows", "logits, 80 rows"}),
        (NotANumber, {f"gated, {rows} rows" for rows in (1, 7, 80)}),
        (DoesNotCompile, {f"norm, {rows} rows" for rows in (1, 7, 80)}),
        (WrongSlot, {"keys and values, written"}),
    ],
)
def test_planted_faults_are_found_and_nothing_else(
    cls: type[TorchOps], found: set[str], dtype: torch.dtype
) -> None:
    assert wrong(check_kernels(cls(dtype, CPU), CONFIG)) == found


class WrongForms(TorchOps):
    """Leaves out what offsets add, and takes the second of two groups for the first."""

    def pack_quantized(self, weight: QuantizedWeight, *rest: Any, **named: Any) -> Linear:
        if weight.offsets is not None:
            weight = replace(weight, offsets=torch.zeros_like(weight.offsets))
        if weight.group == 16:
            weight = replace(weight, scales=weight.scales.roll(1, dims=1))
        return super().pack_quantized(weight, *rest, **named)


def test_forms_of_checkpoints_are_compared_where_there_are_codes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        checks = check_kernels(default_ops(dtype, CPU), CONFIG, stored=True)
        assert wrong(checks) == set() and sum(" bits" in check.name for check in checks) == 12
        assert not any(" bits" in check.name for check in check_kernels(default_ops(dtype, CPU), CONFIG))
    found = check_kernels(WrongForms(torch.float32, CPU), CONFIG, stored=True)
    forms = ("4 bits, offsets", "4 bits, a table")
    assert wrong(found) == {f"linear, {form}, {rows} rows" for form in forms for rows in (1, 80, 256)}
    assert {check.kernel for check in found if not check.right} == {"linear"}


def test_an_error_is_one_line() -> None:
    first = check_kernels(DoesNotCompile(torch.float32, CPU), CONFIG)[0]
    assert str(first) == "does not run: RuntimeError: Failed to find C compiler. Please specify via CC"


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["env", "--json", "--check-kernels"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks and all(check["right"] for check in checks)
    monkeypatch.setattr(
        "draftwise.kernels.select.default_ops", lambda *_, **__: WrongTrees(torch.float32, CPU)
    )
    assert main(["env", "--check-kernels", "--model", str(embedded_path("target"))]) == 1
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if "WRONG" in line).startswith("attention, tree")


def test_rounded_layers_and_norms_of_heads() -> None:
    """Compared only where a model has them."""
    scheme = parse_scheme("int8_weight_only")
    names = {check.name for check in check_kernels(TorchOps(torch.float32, CPU), CONFIG)}
    normed = replace(CONFIG, qk_norm=True)
    more = check_kernels(TorchOps(torch.float32, CPU), normed, scheme)
    assert {check.name for check in more} - names == {
        *(f"linear, int8_weight_only, {rows} rows" for rows in (1, 7, 80)),
        "queries, normalised, rotated",
        "keys and values, normalised, written",
    }
    # plain torch does not round what it packs: that is seen
    assert {check.kernel for check in more if not check.right} == {"linear"}
