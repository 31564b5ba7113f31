"""Self-speculation: the target's own first layers draft (docs/algorithms/early_exit.md).

Sources: Elhoushi et al., *LayerSkip* (2404.16710), section 4.3; Zhang et al., *Draft & Verify* (2309.08168).
"""

from __future__ import annotations

from typing import ClassVar, Self

from draftwise.errors import ConfigError
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.kv.storage import KVStorage
from draftwise.propose.base import DraftRow, ProposerContext
from draftwise.propose.models.proposer import ModelProposer


def default_num_layers(num_layers: int) -> int:
    """The default number of layers that draft: a quarter of the target's, at least one.

    That is where LayerSkip leaves the models it trained for it (layer 8 of 32). Fewer layers cost less per draft, more
    are right more often; docs/algorithms/early_exit.md has measurements.
    """
    return max(1, num_layers // 4)


class EarlyExitProposer(ModelProposer):
    """Drafts with the target's first layers, its final norm and its head, on the target's own K/V.

    No weights and no storage of its own: what the first layers store of a committed token is what they compute of it,
    so that nothing has to be caught up, not even after a prefix-cache hit, a preemption or steps without drafting.
    Drafts are written to lookahead slots of the target's storage; the pass that verifies them writes the same rows
    again, with the later layers.
    """

    name: ClassVar[str] = "early_exit"
    has_storage: ClassVar[bool] = False
    _target_layers = 1

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Cut the target behind ``draft_num_layers`` layers.

        Raises:
            ConfigError: the target has no more layers than that, or its family cannot be cut.
        """
        config, target = context.speculative, context.target_config
        if target.num_layers < 2:
            raise ConfigError("method 'early_exit' needs a target of two layers or more; it has one")
        count = config.draft_num_layers or default_num_layers(target.num_layers)
        if count >= target.num_layers:
            raise ConfigError(
                f"speculative_config.draft_num_layers: {count} layers would draft for a target of "
                f"{target.num_layers}; at most {target.num_layers - 1} can"
            )
        try:
            model = context.target_model.first_layers(count)
        except NotImplementedError as error:
            raise ConfigError(f"method 'early_exit': {error}") from error
        if context.graphs is not None:
            model = context.graphs.draft_model(
                model, config.num_speculative_tokens, context.graphs.tree_of(config), shares=True
            )
        proposer = cls(
            model,
            block_size=context.block_size,
            max_model_len=context.max_draft_len,
            max_num_seqs=context.max_num_seqs,
            sample_method=context.sample_method,
        )
        proposer._target_layers = target.num_layers
        return proposer

    def _filled(self, row: DraftRow) -> int:
        # Everything but the root is in the target's storage, whoever drafted before.
        return row.num_tokens - 1

    def drafts_stored(self, row: DraftRow) -> int:
        return 0  # verification overwrites them

    def memory_per_block(self) -> int:
        return 0

    def memory_fixed(self) -> int:
        layout = self._model.kv_layout()
        per_layer = KVStorage.bytes_per_block(layout, self._block_size, self._model.dtype) // len(layout)
        return self.target_scratch_blocks() * per_layer * self._target_layers

    def target_scratch_blocks(self) -> int:
        return self._scratch_blocks(0).count

    def use_target_storage(self, storage: KVStorage) -> None:
        self._storage = storage
        if isinstance(self._model, GraphedDecoder):
            self._model.prepare(storage)
