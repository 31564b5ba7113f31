"""Options of other engines that have no meaning here. Values that change nothing are accepted; others are refused by
name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwise.errors import ConfigError, shown

HARMLESS = {
    "max_parallel_loading_workers": "weights stream from the file",
    "disable_custom_all_reduce": "there is one rank",
    "max_seq_len_to_capture": "graphs are captured for every length",
    "swap_space": "preempted requests are computed again, not swapped",
    "use_v2_block_manager": "there is one block manager",
    "disable_log_requests": "requests are not logged",
}
"""Options of other engines that change nothing here whatever they say, and why."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """``allowed``: the values that change nothing here; None: any. ``note``: the line for the log, or empty.
    ``refusal``: the reason why other values are refused."""

    allowed: tuple[Any, ...] | None
    note: str = ""
    refusal: str = ""


FOREIGN = {
    "tokenizer_mode": Foreign(("auto", "hf"), refusal="tokenizers are Transformers' own"),
    "load_format": Foreign(
        ("auto", "hf", "safetensors", "gguf"), refusal="the files say what they are: safetensors or GGUF"
    ),
    "config_format": Foreign(("auto", "hf"), refusal="config.json is read, or a GGUF file"),
    "hf_overrides": Foreign(({},), refusal="change config.json of a copy of the checkpoint instead"),
    "max_logprobs": Foreign(None, "a program may ask for any number; the server has --max-logprobs"),
    "generation_config": Foreign(
        ("auto",), refusal="LLM.get_default_sampling_params() reads the model's generation_config.json"
    ),
    "scheduling_policy": Foreign(
        ("fcfs", "priority"), refusal="requests are served by priority, then by arrival"
    ),
    "cpu_offload_gb": Foreign((0, 0.0), refusal="all weights stand in the device's memory"),
    "limit_mm_per_prompt": Foreign(None, "only text is read"),
    "mm_processor_kwargs": Foreign(None, "only text is read"),
    "disable_chunked_mm_input": Foreign(None, "only text is read"),
    "runner": Foreign(("auto", "generate"), refusal="text is generated; there are no embeddings"),
    "task": Foreign(("auto", "generate"), refusal="text is generated; there are no embeddings"),
    "convert": Foreign(("auto", "none"), refusal="text is generated; there are no embeddings"),
    "structured_outputs_config": Foreign(None, "there is one backend for grammars, llguidance"),
    "guided_decoding_backend": Foreign(None, "there is one backend for grammars, llguidance"),
    "enable_log_requests": Foreign(
        (False,), refusal="requests are not logged; draftwise serve has --access-log"
    ),
    "disable_async_output_proc": Foreign(None, "outputs are made on demand"),
    "logits_processors": Foreign(([], ()), refusal="give them to SamplingParams"),
}
"""Keywords of `LLM` and `EngineArgs` alone, not flags of the commands."""


def take_foreign(given: dict[str, Any]) -> list[str]:
    """Remove these options from ``given`` and return the notes for the log.

    >>> take_foreign({"load_format": "auto", "swap_space": 4})
    ['swap_space has no effect: preempted requests are computed again, not swapped']

    Raises:
        ConfigError: a value that would change something.
    """
    notes = [
        f"{name} has no effect: {reason}"
        for name, reason in HARMLESS.items()
        if given.pop(name, None) is not None
    ]
    for name, foreign in FOREIGN.items():
        if name not in given:
            continue
        value = given.pop(name)
        if isinstance(value, Mapping):
            value = dict(value)
        if foreign.allowed is not None and not any(value == one for one in foreign.allowed):
            raise ConfigError(f"{name}: {shown(value)} is not supported: {foreign.refusal}")
        if foreign.note:
            notes.append(f"{name} has no effect: {foreign.note}")
    return notes
