"""Sampling that a checkpoint advises."""

from __future__ import annotations

from pathlib import Path

from draftwise.config import EngineConfig
from draftwise.errors import RequestError
from draftwise.models.checkpoint import read_json
from draftwise.models.paths import resolve_path
from draftwise.sampling.params import SamplingParams

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of generation_config.json and their names here."""


def default_params(config: EngineConfig) -> SamplingParams:
    """Sampling defaults from generation_config.json beside the model. Missing values and values out of range get the
    plain defaults."""
    assert config.model is not None, "resolve_engine_config names the embedded model"
    params = SamplingParams()
    path = Path(resolve_path(config.model, config.revision)) / "generation_config.json"
    if not path.is_file():
        return params
    given = read_json(path)
    for theirs, ours in _FIELDS.items():
        value = given.get(theirs)
        if value is None:
            continue
        try:
            params = params.replace(**{ours: value})
        except RequestError:
            continue
    return params
