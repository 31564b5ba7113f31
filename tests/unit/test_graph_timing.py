"""The times of captured passes that a controller begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.fake_graphs import FakeGraphs
from tests.fakes.tiny import save_llama

from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.timing import pass_times
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.loader import load_model

CPU = torch.device("cpu")


def test_every_number_of_rows_has_the_time_of_its_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ops(dtype: torch.dtype, device: torch.device, *args: object, **options: object) -> TorchOps:
        return TorchOps(dtype, device, TorchStaticAttention())

    monkeypatch.setattr("draftwise.models.self_test.default_ops", ops)
    inner = load_model(save_llama(tmp_path, seed=1), dtype=torch.float32, device=CPU)
    shapes = tuple(Shape(requests, rows, 160) for requests in (1, 2, 3) for rows in (1, 4))
    model = GraphedDecoder(inner, Captures(shapes), 4, FakeGraphs())
    kv = KVStorage(model.kv_layout(), 40, 4, model.dtype, CPU, spare=True)
    model.prepare(kv)
    times = pass_times(model, kv, 40)
    assert {(t.requests, t.rows, t.context) for t in times} == {
        (n, n * rows, 128) for n in (1, 2) for rows in (1, 2, 3, 4)
    }, "contexts of 1024 do not fit, and 3 is no power of two"
    wide = {t.rows: t.seconds for t in times if t.requests == 2}
    assert wide[4] == wide[6] == wide[8] > 0 and wide[2] > 0
