"""Write a trained demo model as a Hugging Face folder that old and new readers load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from .demo_data import EOS_ID, EOS_TOKEN
from .demo_model import DemoLlama
from .folders import whole_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ (message.content or "").rstrip("\\n") }}
{%- if not loop.last %}{{ "\\n" }}{% endif -%}
{%- endfor -%}
"""
"""The demo model continues Python and knows of no roles: a conversation is its messages, one below the other.

Line ends at the end of a message are left out: the model writes them itself.
Example: user "def add(a, b):", assistant "    return a + b", user "def sub(a, b):" are three lines of code.
"""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_model(
    model: DemoLlama,
    tokenizer: Tokenizer,
    folder: Path,
    provenance: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
) -> None:
    """Write config, weights, tokenizer, generation defaults and, if given, `provenance.json` into `folder`.

    Args:
        model: the trained model; its parameter names are the checkpoint's.
        tokenizer: the tokenizer both models share.
        folder: created if need be; files of these names are replaced.
        provenance: how the weights came to be; left out if None.
        dtype: `bfloat16` or `float32`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(_DTYPES[dtype]).contiguous() for name, tensor in model.state_dict().items()
    }
    with whole_file(folder / "model.safetensors") as partial:
        save_file(weights, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
    with whole_file(folder / "tokenizer.json") as partial:
        tokenizer.save(str(partial))
    _write_json(folder / "config.json", model.shape.hf_config(dtype, EOS_ID))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "model_max_length": model.shape.max_positions,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(EOS_ID): {
                    "content": EOS_TOKEN,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
            },
        },
    )
    with whole_file(folder / "chat_template.jinja") as partial:
        partial.write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID, "do_sample": False})
    if provenance is not None:
        _write_json(folder / "provenance.json", provenance)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with whole_file(path) as partial:
        partial.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
