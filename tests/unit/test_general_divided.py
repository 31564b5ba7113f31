"""Models that are put together from a trace, on several ranks: the logits of the whole, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.architectures import save, small
from tests.fakes.ranks import on_ranks
from tests.unit.test_split import loaded, logits_of
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.ranks import Ranks
from draftwise.models.base import DecoderModel
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.loader import check_divided
from draftwise.models.recorded import RecordedDecoder


def stored(model: DecoderModel) -> int:
    """Numbers of a token in the cache."""
    return sum(layer.elements_per_token for layer in model.kv_layout())


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("gpt_neox", 2),  # q, k and v in one layer, biases, two norms of one hidden state
        ("gpt2", 2),  # an MLP without a gate
        ("granite", 4),  # factors; fewer K/V heads than ranks
        ("olmo2", 2),  # norms over all heads: attention stays whole
        pytest.param("stablelm", 2, marks=pytest.mark.slow),
        pytest.param("smollm3", 4, marks=pytest.mark.slow),
        pytest.param("starcoder2", 2, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_whole(tmp_path: Path, kind: str, size: int) -> None:
    save(small(kind), tmp_path / kind)
    whole = loaded(tmp_path / kind)
    expected = logits_of(whole)

    def work(ranks: Ranks) -> tuple[Tensor, int, int]:
        model = loaded(tmp_path / kind, ranks)
        inner = model.inner if isinstance(model, RecordedDecoder) else model
        assert isinstance(inner, AssembledDecoder)
        return logits_of(model), model.weight_bytes(), stored(model)

    check_divided(tmp_path / kind, size)
    answers = on_ranks(size, work)
    for logits, _, _ in answers:
        assert torch.equal(logits, answers[0][0]), "all ranks have the same bits"
        assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    assert max(num_bytes for _, num_bytes, _ in answers) < 0.9 * whole.weight_bytes()
    assert max(kv for _, _, kv in answers) < stored(whole) or kind == "olmo2"


def test_what_is_not_divided_is_named(tmp_path: Path) -> None:
    save(small("mamba"), tmp_path / "mamba")
    with pytest.raises(ModelLoadError, match="Transformers' code, which is not divided among ranks"):
        on_ranks(2, lambda ranks: loaded(tmp_path / "mamba", ranks))
    save(small("gpt_neox"), tmp_path / "neox")
    with pytest.raises(ConfigError, match="its quantised weights are not divided"):
        on_ranks(2, lambda ranks: loaded(tmp_path / "neox", ranks, quantization="int8"))
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        check_divided(tmp_path / "neox", 2, experts_by_rank=True)
    with pytest.raises(ModelLoadError, match="nothing of it can be divided among 7 ranks"):
        on_ranks(7, lambda ranks: loaded(tmp_path / "neox", ranks))
