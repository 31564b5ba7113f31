"""The recipe of the shipped heads, two steps of it."""

from __future__ import annotations

import argparse
import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from draftwise.errors import ConfigError
from draftwise.train import demo_heads
from draftwise.train.demo_args import add_head_arguments
from draftwise.train.demo_data import is_heldout

BODY = (
    "def f_{i}(self, value):\n    if value is None:\n        return {i}\n    return self.items[value]\n\n\n"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    names = [f"mod_{i}.py" for i in range(200)]
    chosen = [name for name in names if not is_heldout(name)][:6] + [
        name for name in names if is_heldout(name)
    ][:1]
    for name in chosen:
        (root / name).write_text("".join(BODY.format(i=i) for i in range(80)))
    return root


def arguments(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_head_arguments(parser)
    return parser.parse_args(more)


def test_two_steps_make_three_heads(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_heads, "HELDOUT_TEXTS", 2)
    monkeypatch.setattr(demo_heads, "HELDOUT_WINDOWS", 2)
    monkeypatch.setattr(demo_heads, "BATCH", 2)
    for name in ("WINDOW", "OWN_LENGTH", "OWN_PROMPT"):  # a sixteenth of the text
        monkeypatch.setattr(demo_heads, name, getattr(demo_heads, name) // 16)
    torch.set_num_threads(1)
    common = [
        "--out",
        str(tmp_path),
        "--root",
        str(library),
        "--own-texts",
        "4",
        "--no-compile",
        "--steps",
        "2",
    ]
    assert demo_heads.run(arguments(*common), Console(file=StringIO())) == 0
    eagle3 = load_file(tmp_path / "eagle3" / "model.safetensors")
    assert eagle3["lm_head.weight"].shape == (3072, 256) and eagle3["fc.weight"].shape == (256, 768)
    assert int(eagle3["t2d"].sum()) == 3072 and eagle3["d2t"].shape == (3072,)
    assert "model.layers.12.eh_proj.weight" in load_file(tmp_path / "mtp" / "model.safetensors")
    assert "2.1.weight" in load_file(tmp_path / "medusa" / "model.safetensors")
    record = json.loads((tmp_path / "mtp" / "provenance.json").read_text())
    assert record["measured"].keys() == {"own", "text"} and len(record["measured"]["own"]["greedy"]) == 4
    assert np.load(tmp_path / "work" / "own.npy").shape == (4, demo_heads.OWN_LENGTH)


def test_unknown_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eagle5"):
        demo_heads.run(arguments("--out", str(tmp_path), "--heads", "mtp,eagle5"), Console(file=StringIO()))
