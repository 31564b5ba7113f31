"""The tokenizer in a GGUF file: vocabulary, merges, special tokens and chat template are metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.errors import ModelLoadError
from draftwise.models.gguf.reader import read_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_FIELDS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
}


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a file.

    Raises:
        ModelLoadError: it has none, or one of a kind that is not known.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    file = read_gguf(path)
    metadata = file.metadata

    def field(name: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}")

    parts = {ours: field(theirs) for ours, theirs in _FIELDS.items() if field(theirs) is not None}
    if "tokens" not in parts:
        raise ModelLoadError(f"{path} has no tokenizer (tokenizer.ggml.tokens)")
    tokens = parts["tokens"]
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, parts)
    except Exception as error:  # of a third party, on whatever the file says
        raise ModelLoadError(
            f"{path}: its tokenizer cannot be made: {type(error).__name__}: {error}"
        ) from error
    special: dict[str, str] = {}
    for name, key in _SPECIAL.items():
        token = field(f"{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            special[name] = tokens[token]
    sentencepiece = parts.get("tokenizer_type") == "llama"
    added = field("add_bos_token")
    before = "bos_token" in special and (sentencepiece if added is None else bool(added))
    behind = "eos_token" in special and bool(field("add_eos_token"))
    pieces = [special["bos_token"]] * before + ["$A"] + [special["eos_token"]] * behind
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(pieces) if before or behind else "$A",
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(pieces) if token != "$A"],
    )
    maker: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = maker(tokenizer_object=backend, **special)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer
