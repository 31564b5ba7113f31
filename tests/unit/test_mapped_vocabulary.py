"""Two vocabularies: which tokens are the same, and a model behind the map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.tiny import save_llama

from draftwise import ConfigError
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.mapped import MappedDecoder, VocabularyMap

CPU = torch.device("cpu")


class Words:
    """As much of a tokenizer as the map looks at."""

    def __init__(self, pieces: list[str], special: list[str] | None = None, unk: int | None = None) -> None:
        self._pieces = pieces
        self.all_special_tokens = special or []
        self.unk_token_id = unk

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self._pieces)}


def test_tokens_of_equal_bytes_are_the_same() -> None:
    outer = Words(["<s>", "a", "\u0120the", "\u010a", "\u00c3\u00a9", "\u0120x", "only"], ["<s>"])
    inner = Words(
        ["<unk>", "<s>", "\u2581the", "a", "<0x0A>", "\u00e9", "\u2581y", "\u2581z"], ["<s>", "<unk>"], unk=0
    )
    found = VocabularyMap.of(outer, inner, 8, 8)
    # A byte-level space, newline and e acute against SentencePiece's.
    assert found.to_inner.tolist() == [1, 3, 2, 4, 5, 0, 0, 0]
    assert found.shared_outer.tolist() == [0, 1, 2, 3, 4]
    assert found.shared_inner.tolist() == [1, 3, 2, 4, 5]


def test_special_tokens_are_not_text_and_rows_without_a_token_are_nothing() -> None:
    outer = Words(["<s>", "a", "b"], ["<s>"])
    inner = Words(["<s>", "b", "a"])  # here "<s>" is text
    found = VocabularyMap.of(outer, inner, 5, 2)  # the model has no row for its token 2
    assert found.to_inner.tolist() == [0, 0, 1, 0, 0]
    assert found.shared_outer.tolist() == [2] and found.shared_inner.tolist() == [1]
    with pytest.raises(ConfigError, match="no token in common"):
        VocabularyMap.of(Words(["a"]), Words(["b"]), 1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(save_llama(tmp_path_factory.mktemp("m"), seed=8), dtype=torch.float32, device=CPU)


def test_a_mapped_model_is_the_model_with_other_ids(model: Any) -> None:
    """Outer token t is the model's token perm[t], or none: logits are moved, and -1e30 elsewhere."""
    size = model.config.vocab_size
    perm = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    shared = torch.arange(0, size, 2)
    to_inner = torch.zeros(size + 3, dtype=torch.int64)
    to_inner[shared] = perm[shared]
    mapped = MappedDecoder(model, VocabularyMap(perm[shared], shared, to_inner))
    assert mapped.config.vocab_size == size + 3
    ids = [2, 4, 7, 8, 60]  # 7 is not shared: the model reads token 0
    table = np.arange(4, dtype=np.int32)

    def run(decoder: Any, tokens: list[int]) -> torch.Tensor:
        kv = KVStorage(model.kv_layout(), 4, 8, torch.float32, CPU)
        with torch.inference_mode():
            batch = build_step_input([RowInput(tokens, 0, table)], 8, CPU)
            logits: torch.Tensor = decoder.forward_logits(batch, kv)[1]
            return logits.clone()

    got = run(mapped, ids)
    wanted = run(model, [int(to_inner[t]) for t in ids])
    assert torch.equal(got[:, shared], wanted[:, perm[shared]])
    rest = [i for i in range(size + 3) if i % 2 or i >= size]
    assert (got[:, rest] == -1e30).all() and got.shape == (5, size + 3)
    assert got.softmax(-1)[:, rest].max() == 0
