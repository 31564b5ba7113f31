"""The draft model of a configuration, as it fits its target."""

from __future__ import annotations

import logging

from draftwise.config.heads import mask_token_of
from draftwise.config.methods import read_config
from draftwise.errors import ConfigError
from draftwise.models.base import DecoderModel
from draftwise.propose.base import ProposerContext

logger = logging.getLogger("draftwise")


def load_draft_model(context: ProposerContext) -> DecoderModel:
    """The draft model named by ``speculative_config``, behind a map of vocabularies, or captured, where that is wanted.

    Raises:
        ConfigError: it does not fit the target.
        ModelLoadError: it cannot be loaded.
    """
    from draftwise.models.loader import load_model

    config = context.speculative
    if config.model is None:
        raise ConfigError("speculative_config: method 'draft_model' needs 'model', a folder or hub id")
    model = load_model(
        config.model,
        dtype=context.dtype,
        device=context.device,
        revision=config.revision,
        quantization=config.quantization,
        adapter=config.lora_path,
        ranks=context.ranks,
    )
    if config.use_heterogeneous_vocab:
        model = _mapped(model, context)
    elif model.config.vocab_size != context.vocab_size:
        raise ConfigError(
            f"the draft model {config.model!r} has a vocabulary of {model.config.vocab_size} tokens, the target "
            f"one of {context.vocab_size}; they must be the same (or use_heterogeneous_vocab given)"
        )
    elif context.graphs is not None:
        mask = None
        if config.parallel_drafting:
            mask = mask_token_of(read_config(config.model, config.revision) or {})
        model = context.graphs.draft_model(
            model, config.num_speculative_tokens, context.graphs.tree_of(config), mask=mask
        )
    return model


def _mapped(model: DecoderModel, context: ProposerContext) -> DecoderModel:
    """The draft model behind a map between its vocabulary and the target's."""
    from draftwise.models.mapped import MappedDecoder, VocabularyMap
    from draftwise.models.tokenizer import load_tokenizer

    assert context.speculative.model is not None
    if context.tokenizer is None:
        raise ConfigError(
            "speculative_config.use_heterogeneous_vocab: needs the target's tokenizer (skip_tokenizer_init is given)"
        )
    own = load_tokenizer(context.speculative.model, context.speculative.revision)
    vocabulary = VocabularyMap.of(context.tokenizer, own, context.vocab_size, model.config.vocab_size)
    logger.info(
        "the draft model %r shares %d of its %d tokens with the target, which has %d",
        context.speculative.model,
        len(vocabulary.shared_outer),
        model.config.vocab_size,
        context.vocab_size,
    )
    return MappedDecoder(model, vocabulary)
