"""``attn_logit_softcapping`` in a config.json reaches the kernels; what is not there is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.architectures import save, small
from tests.fakes.tiny import save_llama
from tests.native import native_or_skip

from draftwise.errors import ModelLoadError
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models import lending
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_config, load_model

CPU = torch.device("cpu")


def with_setting(folder: Path, **settings: Any) -> str:
    path = Path(save_llama(folder, seed=3)) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return str(folder)


def test_native_recorded_passes_agree_with_plain_torch(tmp_path: Path) -> None:
    library = native_or_skip()
    folder = with_setting(tmp_path, attn_logit_softcapping=0.3)
    table = torch.arange(8, dtype=torch.int32).numpy()
    batch = build_step_input([RowInput([3, 9, 1, 7, 5, 2, 40], 0, table)], 4, CPU)
    native = NativeOps(library, ThreadPool(library, 2), torch.float32)
    results = []
    for ops in (native, TorchOps(torch.float32, CPU)):
        model = load_model(folder, dtype=torch.float32, device=CPU, ops=ops)
        assert model.config.attn_softcap == 0.3
        kv = KVStorage(model.kv_layout(), 8, 4, torch.float32, CPU)
        with torch.inference_mode():
            results.append(model.forward_logits(batch, kv)[1])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    plain = load_model(save_llama(tmp_path / "plain", seed=3), dtype=torch.float32, device=CPU)
    kv = KVStorage(plain.kv_layout(), 8, 4, torch.float32, CPU)
    with torch.inference_mode():
        other = plain.forward_logits(batch, kv)[1]
    assert float((other - results[0]).abs().max()) > 1e-2, "a cap that never bites proves nothing"


def test_bad_values_and_caps_on_logits_are_refused(tmp_path: Path) -> None:
    for i, value in enumerate((0, -1.0, "much", True)):
        folder = with_setting(tmp_path / str(i), attn_logit_softcapping=value)
        with pytest.raises(ModelLoadError, match="attn_logit_softcapping"):
            load_config(folder)
    with pytest.raises(ModelLoadError, match="final_logit_softcapping"):
        load_config(with_setting(tmp_path / "final", final_logit_softcapping=30.0))


def test_whole_tables_lend_the_cap_behind_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target that ranks share, to a head on one of them."""
    save(small("gemma2"), tmp_path)
    ops = TorchOps(torch.float32, CPU)
    monkeypatch.setattr(lending, "default_ops", lambda *_, **__: ops)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU, ops=ops)
    own = model.shared_weights()
    lent = lending.WholeTables(model, tmp_path, None, None).shared_weights()
    assert lent.tail == own.tail != ()
    assert torch.equal(lent.embedding, own.embedding)
