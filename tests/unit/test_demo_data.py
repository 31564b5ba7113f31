"""The text of the demo models: a split that never moves, a tokenizer that loses nothing, fixed prompts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from draftwise.train.demo_data import (
    EOS_ID,
    EOS_TOKEN,
    Corpus,
    build_corpus,
    heldout_prompts,
    is_heldout,
    join_files,
    read_source,
    stdlib_files,
    train_tokenizer,
)

ASSETS = Path(__file__).parents[2] / "src/draftwise/assets/demo"


def test_split_is_a_fixed_function_of_the_relative_path() -> None:
    held = ["statistics.py", "socket.py", "trace.py", "asyncio/futures.py", "email/charset.py"]
    trained = ["heapq.py", "argparse.py", "asyncio/events.py", "json/decoder.py", "typing.py"]
    assert all(map(is_heldout, held))
    assert not any(map(is_heldout, trained))


def test_library_files_are_listed_once_in_order_and_on_one_side() -> None:
    files = stdlib_files()
    names = [file.relative for file in files]
    assert names == sorted(set(names))
    held = {file.relative for file in files if file.heldout}
    assert held.isdisjoint(file.relative for file in files if not file.heldout)
    share = len(held) / len(files)
    assert 0.02 < share < 0.06
    assert "heapq.py" in names
    assert not any(
        name.startswith(("encodings/", "pydoc_data/")) or "site-packages" in name for name in names
    )
    assert all(file.kind == "test" for file in files if file.relative.startswith("test/"))


def test_listing_needs_no_torch() -> None:
    code = "import sys, draftwise.train.demo_data as d; d.stdlib_files(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A little library: files on both sides of the split, a table, bad bytes."""
    body = "def f_{i}(self, value):\n    if value is None:\n        return {i}\n    return self.items[value]\n\n\n"
    for i in range(120):
        (tmp_path / f"module_{i}.py").write_text(body.replace("{i}", str(i)) * 4)
    (tmp_path / "table.py").write_text("X = [" + "1234, " * 300 + "]\n")
    (tmp_path / "broken.py").write_bytes(b"# \xff\xfe" * 100)
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings/cp1.py").write_text("x = 1\n" * 100)
    return tmp_path


def test_tables_and_undecodable_files_are_left_out(library: Path) -> None:
    files = {file.relative: file for file in stdlib_files(library)}
    assert "encodings/cp1.py" not in files
    assert read_source(files["table.py"]) is None
    assert read_source(files["broken.py"]) is None
    assert read_source(files["module_1.py"]) is not None


def _tokenizer(library: Path) -> Tokenizer:
    texts = [read_source(file) for file in stdlib_files(library) if not file.heldout]
    return train_tokenizer([text for text in texts if text], vocab_size=320)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "\n\n\n    \n",
        "def f():\n\treturn 'ä€🎉\\n'\r\n",
        "  lead and trail  ",
        "a\n    b\n        c\n\n",
    ],
)
def test_tokenizer_round_trip(library: Path, text: str) -> None:
    tokenizer = _tokenizer(library)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(EOS_TOKEN) == EOS_ID


def test_corpus_windows_repeat_and_never_hold_heldout_files(library: Path) -> None:
    tokenizer = _tokenizer(library)
    corpus = build_corpus(tokenizer, stdlib_files(library))
    first = corpus.window_epochs(32, seed=3, test_parts=2)
    second = corpus.window_epochs(32, seed=3, test_parts=2)
    one, two = next(first), next(first)
    assert one.shape[1] == 33
    assert np.array_equal(one, next(second))
    assert one.shape != two.shape or not np.array_equal(one, two)
    assert len(one) * 32 > sum(map(len, corpus.library)) * 0.9
    assert corpus.heldout
    only_held = Corpus([], [], corpus.heldout, corpus.heldout_bytes)
    assert only_held.heldout_bytes == sum(len(tokenizer.decode(ids.tolist())) for ids in corpus.heldout)


def test_files_are_joined_by_end_of_text() -> None:
    stream = join_files([np.array([5, 6], dtype=np.uint16), np.array([7], dtype=np.uint16)])
    assert stream.tolist() == [EOS_ID, 5, 6, EOS_ID, 7, EOS_ID]


def test_heldout_prompts_are_fixed_and_start_at_definitions(library: Path) -> None:
    tokenizer = _tokenizer(library)
    prompts = heldout_prompts(tokenizer, 6, 10, seed=1, root=library)
    assert prompts == heldout_prompts(tokenizer, 6, 10, seed=1, root=library)
    assert prompts[:3] == heldout_prompts(tokenizer, 3, 10, seed=1, root=library)
    assert prompts != heldout_prompts(tokenizer, 6, 10, seed=2, root=library)
    assert len({prompt.source for prompt in prompts}) == 6
    for prompt in prompts:
        assert len(prompt.token_ids) == 10
        assert is_heldout(prompt.source.rpartition(":")[0])
        assert tokenizer.decode(prompt.token_ids).startswith("def ")


def test_prompts_from_the_real_library() -> None:
    tokenizer = Tokenizer.from_file(str(ASSETS / "target/tokenizer.json"))
    prompts = heldout_prompts(tokenizer, 24, 128)
    assert len(prompts) == 24
    assert len({prompt.source.rpartition(":")[0] for prompt in prompts}) >= 10
