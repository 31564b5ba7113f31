"""An engine's own test of Triton's kernels, in the interpreter: what is wrong is replaced by torch, and said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes.flash import flash_forward

from draftwise.attention.torch_grouped import TorchGroupedAttention
from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels import replaced
from draftwise.kernels.replaced import FAMILIES, replaced_kernels
from draftwise.kernels.select import default_ops, on_triton
from draftwise.kernels.stacked import StackedAdditions
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kernels.triton import availability, inputs, prompts, rows
from draftwise.kernels.triton import ops as triton_ops
from draftwise.kernels.triton.attention import TritonAttention
from draftwise.kernels.triton.ops import TritonOps
from draftwise.models import checking, self_test
from draftwise.models.checking import KernelCheck, check_kernels
from draftwise.models.loader import load_config
from draftwise.models.self_test import settle, settled_ops
from draftwise.quantization.scheme import parse_scheme
from draftwise.runner import step_checks
from draftwise.runner.step_checks import check_steps, settle_steps

pytestmark = pytest.mark.skipif(
    not availability.interpreted(), reason="faults are planted in the interpreter"
)
CPU = torch.device("cpu")
CONFIG = replace(
    load_config(embedded_path("target")),
    hidden_size=16,
    intermediate_size=16,
    vocab_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_model_len=80,
    qk_norm=True,
)


@pytest.fixture(autouse=True)
def _tested_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "triton")
    for module in (self_test, step_checks):
        monkeypatch.setattr(module, "TESTED", frozenset({"cpu"}))
    monkeypatch.setattr(checking, "_ROWS", (3,))
    monkeypatch.setattr(checking, "_CHUNK", 5)
    monkeypatch.setattr(replaced, "_replaced", {})
    yield


def breaks(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Failed to find C compiler")


def test_right_kernels_stay(caplog: pytest.LogCaptureFixture) -> None:
    ops = settled_ops(CONFIG, torch.float32, CPU)
    assert isinstance(ops, TritonOps) and isinstance(ops._attention, TritonAttention)
    settle_steps(CPU, 24, 16)
    assert not replaced_kernels("cpu") and on_triton(CPU) and not caplog.records


@pytest.mark.parametrize("family", ["norm", "gated", "gather", "rotation"])
def test_a_kernel_that_differs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    name = {"norm": "rms_norm", "gated": "silu_mul", "gather": "gather_rows", "rotation": "rope_write"}[
        family
    ]
    launch = getattr(rows, name)
    monkeypatch.setattr(rows, name, lambda *args, **kwargs: launch(*args, **kwargs).mul_(1.5))
    ops = settled_ops(CONFIG, torch.float32, CPU)
    # a table of rotations is gathered, too
    assert family in replaced_kernels("cpu") <= {family, "rotation"}
    (record,) = caplog.records
    assert "WRONG" in record.getMessage() and "plain torch instead" in record.getMessage()
    caplog.clear()
    assert all(check.right for check in check_kernels(ops, CONFIG)), "torch does it right"
    if family == "gated":  # the command still shows the kernel itself
        shown = check_kernels(default_ops(torch.float32, CPU, untested=True), CONFIG)
        assert {check.kernel for check in shown if not check.right} == {"gated"}
        settled_ops(CONFIG, torch.float32, CPU)
        assert not caplog.records, "it is said once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """Nothing of Triton runs: the model does all the same."""
    for name in ("rms_norm", "silu_mul", "gather_rows", "rope_write"):
        monkeypatch.setattr(rows, name, breaks)
    monkeypatch.setattr(TritonAttention, "run", breaks)
    monkeypatch.setattr("draftwise.kernels.triton.ops.add_low_rank", breaks)
    ops = settled_ops(CONFIG, dtype, CPU, adapters=True)
    assert replaced_kernels("cpu") == {*FAMILIES} - {"linear", "prompts"}, "products of floats are torch's"
    assert isinstance(ops, TritonOps) and isinstance(ops._attention, TorchGroupedAttention)
    assert not ops.capturable
    assert all(check.right for check in check_kernels(ops, CONFIG, adapters=True))
    (record,) = caplog.records
    assert "does not run: RuntimeError: Failed to find C compiler" in record.getMessage()
    with pytest.raises(ConfigError, match="batch_invariant: Triton's kernels of products or attention"):
        settled_ops(CONFIG, dtype, CPU, batch_invariant=True)


def test_adapters_of_the_wrong_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for where requests may have adapters, and nowhere else."""

    def crossed(x: torch.Tensor, out: torch.Tensor, additions: StackedAdditions, site: int) -> None:
        places = additions.places
        additions.for_pass(places.flip(0), additions.rows)
        additions.add(x, out, site)
        additions.for_pass(places, additions.rows)

    monkeypatch.setattr("draftwise.kernels.triton.ops.add_low_rank", crossed)
    settled_ops(CONFIG, torch.float32, CPU)
    assert not replaced_kernels("cpu")
    ops = settled_ops(CONFIG, torch.float32, CPU, adapters=True)
    assert replaced_kernels("cpu") == {"low_rank"}
    assert all(check.right for check in check_kernels(ops, CONFIG, adapters=True)), "torch does it right"


def test_trees_alone_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TritonAttention.run

    def blind(self: TritonAttention, q: Any, kv: Any, batch: Any, **named: Any) -> Any:
        plain = replace(batch, is_tree_np=batch.is_tree_np & False, ancestors_np=None, cache={})
        return run(self, q, kv, plain, **named)

    monkeypatch.setattr(TritonAttention, "run", blind)
    settled_ops(CONFIG, torch.float32, CPU)
    assert replaced_kernels("cpu") == {"attention"}


@pytest.mark.parametrize("wrong", [False, True])
def test_flash_attention_is_compared_by_itself(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """Where it is wrong, chunks of prompts have the kernel of all other rows."""
    called = []

    def flash(*args: Any, **named: Any) -> Any:
        called.append(len(args[0]))
        return flash_forward(*args, **named) * (0.9 if wrong else 1.0)

    monkeypatch.setattr(triton_ops, "PROMPT_ROWS", 8)
    monkeypatch.setattr(checking, "_LONG", 9)
    monkeypatch.setattr(prompts, "has_flash", lambda device: True)
    monkeypatch.setattr(prompts, "flash", flash)
    ops = settled_ops(CONFIG, torch.float16, CPU)
    assert replaced_kernels("cpu") == ({"prompts"} if wrong else set())
    called.clear()
    assert all(check.right for check in check_kernels(ops, CONFIG))
    assert called == ([] if wrong else [9])


def test_rounded_weights_without_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept as floats, rounded as before."""
    from draftwise.kernels.triton import ops as module

    product = module.linear

    def wrong(x: Any, layer: Any, *rest: Any) -> Any:
        return product(x, layer, *rest) * (1.0 if layer.bits == 16 else 1.5)

    monkeypatch.setattr(module, "linear", wrong)
    scheme = parse_scheme("int8_weight_only")
    ops = settled_ops(CONFIG, torch.float32, CPU, scheme)
    assert replaced_kernels("cpu") == {"linear"}
    assert all(check.right for check in check_kernels(ops, CONFIG, scheme))


def test_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One of the kernels between passes is wrong: all of them are left."""
    next_rows = inputs.next_rows
    monkeypatch.setattr(step_checks, "next_rows", lambda *args: next_rows(*args)._replace(slots=args[0] * 0))
    assert {check.name for check in check_steps(CPU, 24, 16) if not check.right} == {"rows of the next draft"}
    settle_steps(CPU, 24, 16)
    assert not on_triton(CPU) and on_triton(CPU, untested=True)
    assert "rows of the next draft: WRONG" in caplog.text
    assert isinstance(default_ops(torch.float32, CPU), TritonOps), "passes keep theirs"


@pytest.mark.parametrize("vocab_size", [5, 300])
def test_steps_of_other_sizes(vocab_size: int) -> None:
    assert [str(check) for check in check_steps(CPU, vocab_size, 4) if not check.right] == []


PLANTED = {
    "best tokens": ("best_tokens", lambda found: found._replace(tokens=found.tokens.flip(0))),
    "draws": ("sample_tokens", lambda found: found + 1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_faults_of_steps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    launcher, spoiled = PLANTED[name]
    right = getattr(step_checks, launcher)
    monkeypatch.setattr(step_checks, launcher, lambda *args, **kwargs: spoiled(right(*args, **kwargs)))
    wrong = {check.name for check in check_steps(CPU, 24, 16) if not check.right}
    assert name in wrong <= {name, "best tokens, with noise"}


def test_verification_and_seats_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwise.graphs.seats import kernels
    from draftwise.verify import triton

    walked = triton.walk_trees

    def short(logits: Any, batch: Any, members: Any, **named: Any) -> None:
        walked(logits, batch, members, **named)
        batch.walk.packed[:, 0].clamp_(max=0)

    monkeypatch.setattr(triton, "walk_trees", short)
    monkeypatch.setattr(kernels, "advance", lambda *_: None)
    monkeypatch.setattr(step_checks, "compact_paths", lambda *_: None)
    wrong = {check.name for check in check_steps(CPU, 24, 16) if not check.right}
    assert wrong == {"verification, greedy", "verification, coupled", "seats", "accepted paths, moved"}


def test_look_ups_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, for it stands behind all else of a step."""
    from draftwise.graphs.seats import kernels

    monkeypatch.setattr(kernels, "look_up", lambda *_: None)
    wrong = {check.name for check in check_steps(CPU, 24, 16) if not check.right}
    assert wrong == {"seats"}


def test_ranks_agree(caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong on another rank alone is replaced here, too."""

    class Other:
        """Rank 0 finds "norm" wrong; asked in the order of the names."""

        def __init__(self) -> None:
            self.asked = iter((*FAMILIES, "steps"))

        def least(self, value: int) -> int:
            return min(value, 0 if next(self.asked) == "norm" else 1)

    right = KernelCheck("gated", "gated", 0.0, 1.0)
    settle([right], CPU, Other())  # type: ignore[arg-type]
    assert replaced_kernels("cpu") == {"norm"}


def test_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", breaks)
    check = KernelCheck("norm", "norm, 1 rows", float("nan"), 1.0, "RuntimeError: illegal memory access")
    with pytest.raises(ModelLoadError, match=r"set DRAFTWISE_KERNELS=torch .*illegal memory access"):
        settle([check], CPU)


def test_plain_torch_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    monkeypatch.setattr(self_test, "check_kernels", breaks)
    assert isinstance(settled_ops(CONFIG, torch.float32, CPU), TorchOps)
