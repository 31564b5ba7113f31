"""Training that is interrupted, killed, or out of room: what is on the disk is whole, and nobody stays behind."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.fakes import training_child
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from draftwise.errors import ConfigError, DraftwiseError
from draftwise.train.checkpoint import read_checkpoint, write_checkpoint
from draftwise.train.folders import whole_file
from draftwise.train.heads.child import be_child
from draftwise.train.heads.parallel import with_ranks
from draftwise.train.heads.trainer import _Interrupts

ROOT = Path(__file__).parents[2]


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """No file may become longer."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(9000))


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("x" * 9000),
    "safetensors": lambda path: save_file({"a": torch.zeros(9000)}, path),
    "tokenizers": lambda path: Tokenizer(WordLevel({str(i): i for i in range(2000)}, "0")).save(str(path)),
    "numpy": _npy,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_leaves_the_file_before(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with (
        full_disk(4096),
        pytest.raises(DraftwiseError, match=r"/file cannot be written: .*(File too large|requested and)"),
        whole_file(path) as other,
    ):
        WRITERS[kind](other)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "before"
    with whole_file(path) as other:
        WRITERS[kind](other)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.stat().st_size > 4096


def test_ctrl_c_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(KeyboardInterrupt), whole_file(path) as other:
        other.write_text("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with pytest.raises(DraftwiseError, match="No space left"), whole_file(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_checkpoints_are_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saved = {"heads": {"weight": torch.arange(3000.0)}}
    write_checkpoint(path, saved)
    with full_disk(4096), pytest.raises(DraftwiseError, match="cannot be written: File too large"):
        write_checkpoint(path, saved)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert torch.equal(read_checkpoint(path, "heads")["heads"]["weight"], torch.arange(3000.0))
    with pytest.raises(ConfigError, match="no checkpoint of this kind"):
        read_checkpoint(path, "progress")
    whole = path.read_bytes()
    for bad in (
        b"",
        whole[:100],
        whole[: len(whole) // 2],
        whole[:-1],
        b"text",
        pickle.dumps(signal.Signals),
    ):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_checkpoint(path, "heads")
    torch.save([1], path)
    with pytest.raises(ConfigError, match="no checkpoint"):
        read_checkpoint(path, "heads")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
        assert not interrupts.asked and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("work", "code", "says"),
    [
        (training_child.is_stopped, 130, ""),
        (training_child.fails, 1, "[process 1] no text at all\n"),
    ],
)
def test_how_a_process_ends(work: Any, code: int, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    process = torch.multiprocessing.get_context("spawn").Process(
        target=be_child, args=(pickle.dumps(work), 1, "")
    )
    process.start()
    process.join(60)
    assert (process.exitcode, capfd.readouterr().err) == (code, says)


def test_processes_meet_in_a_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for each other in two folders, for a day."""
    folder = tmp_path / "a folder: 100%"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert with_ranks(2, "cpu", lambda ranks: ranks.sum(1.0), training_child.counts) == [2.0]
    assert not list(folder.iterdir())


def test_no_process_outlives_the_first() -> None:
    """It waited for the first one, for a day. That it is gone is seen by the end of what it could write."""
    first = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.training_child"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert first.stdout is not None and first.stdout.readline() == b"here\n"
    first.kill()
    assert first.communicate(timeout=30) == (b"", b"")
