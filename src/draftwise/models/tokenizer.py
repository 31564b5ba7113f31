"""Tokenizers: the fast ones of Transformers, and only those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import read_json
from draftwise.models.gguf.reader import is_gguf
from draftwise.models.gguf.tokenizer import gguf_tokenizer
from draftwise.models.paths import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(
    path: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder, GGUF file or hub id.

    Raises:
        ModelLoadError: the folder has none, it cannot be read, or it is a slow one (streaming text needs the speed
            of the fast kind).
    """
    folder = resolve_path(path, revision, weights=False, code=trust_remote_code)
    from transformers import PreTrainedTokenizerFast

    tokenizer: object
    try:
        if is_gguf(folder):
            tokenizer = gguf_tokenizer(folder)
        elif _is_generic(folder):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a broken file makes it raise
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"no tokenizer can be loaded from {folder}: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"{folder} has a slow tokenizer ({type(tokenizer).__name__}); a tokenizer.json is needed"
        )
    # Models of text and images had their template in a file of their own before Transformers 4.53.
    beside = folder / "chat_template.json"
    if not tokenizer.chat_template and beside.is_file():
        tokenizer.chat_template = read_json(beside).get("chat_template")
    # A tokenizer.json may cut and pad, as its training did. The first call would switch that off, and must not do so
    # while another thread encodes.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Whether the files alone describe the tokenizer, with no class of its own behind it.

    `AutoTokenizer` would choose the same class, but importing it takes over a second of a command's start.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # AutoTokenizer's error message is the better one
    generic = config.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return generic and "auto_map" not in config and (folder / "tokenizer.json").is_file()
