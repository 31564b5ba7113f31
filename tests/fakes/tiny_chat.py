"""A tiny random model with a byte-level tokenizer and a chat template: text in and out, though without sense."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tiny import save_llama

TEMPLATE = (
    "{% if tools %}[tools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tiny_chat(folder: Path, *, max_position_embeddings: int = 512) -> str:
    """The folder of the model: 256 bytes, then <|begin|> 256, <|end|> 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from draftwise.engine.detokenizer import byte_of_char

    vocab = dict(byte_of_char())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return save_llama(
        folder,
        seed=7,
        vocab_size=258,
        bos_token_id=256,
        eos_token_id=257,
        max_position_embeddings=max_position_embeddings,
    )
