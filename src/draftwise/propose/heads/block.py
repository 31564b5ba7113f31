"""The method ``dflash``: drafters that fill in a block in one pass (DFlash, DSpark; docs/algorithms/dflash.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.blocks import BlockLayout
from draftwise.models.heads.base import HeadModel
from draftwise.models.heads.block import BLOCK, CONTEXT, BlockHead
from draftwise.models.heads.recorded import RecordedBlock
from draftwise.models.heads.wrapped import WrappedHead
from draftwise.models.inputs import RowInput
from draftwise.propose.base import ProposerContext
from draftwise.propose.chains import draw_in_one_pass, draw_next
from draftwise.propose.heads.passes import HeadDraft, Rows
from draftwise.propose.heads.proposer import HeadProposer
from draftwise.propose.heads.trees import RootedTrees
from draftwise.propose.trees.growth import TreeLevel


@dataclass(frozen=True, slots=True)
class Block:
    """The result of one pass for a request: draft i, from 0, is drawn from row i."""

    logits: Tensor  # [length, Vd] float32
    hidden: Tensor  # [length, H]


class BlockProposer(HeadProposer):
    """Runs a block drafter: what it stores of committed tokens are the target's features alone, one pass over those
    that are new and one over root and masks give the distributions of all drafts.

    They depend on committed tokens alone (DFlash), or also on the drafts before (DSpark, Domino, DFlash2), never on
    other requests. A chain draws one token of each; a tree draws several of each and goes on below every one of them:
    the same passes, whatever its shape. Features, chunks, prefix hits, gaps and preemption are `HeadProposer`'s.
    The block's own keys and values are scratch. On native kernels all of it is one call (`kernels.cpu.blocks`).
    """

    name: ClassVar[str] = "dflash"

    @classmethod
    def load(cls, context: ProposerContext) -> HeadModel:
        from draftwise.models.heads.loading import load_block

        return load_block(context)

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """As `HeadProposer.create`.

        Raises:
            ConfigError: more is to be drafted than a block has room for.
        """
        proposer = super().create(context)
        config, room = context.speculative, proposer._block.max_drafts
        depth = config.num_speculative_tokens
        what = f"num_speculative_tokens {depth}"
        if config.speculative_token_tree is not None:
            depth = max(len(path) for path in config.speculative_token_tree)
            what = f"speculative_token_tree: a path of {depth} tokens"
        elif config.speculative_dynamic_tree is not None:
            depth = config.speculative_dynamic_tree.depth
            what = f"speculative_dynamic_tree: depth {depth}"
        if depth > room:
            raise ConfigError(
                f"speculative_config.{what} is more than the block of {config.model!r} has room for ({room})"
            )
        proposer._most = depth
        return proposer

    def __init__(self, head: HeadModel, **options: object) -> None:
        super().__init__(head, **options)  # type: ignore[arg-type]
        inner = head.inner if isinstance(head, WrappedHead) else head
        assert isinstance(inner, BlockHead)
        self._block = inner
        self._most = inner.max_drafts
        """Drafts that a block has rows for, whatever of them is wanted: rows that see one another say something else
        in a shorter block, and drafts should not depend on the other requests of a step."""

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        if isinstance(self._head, RecordedBlock):
            scratch, block = self._scratch, self._block
            self._head.lay_out(
                BlockLayout(
                    self._most,
                    block.first_row,
                    block.options.mask_token,
                    scratch.first,
                    scratch.each,
                    scratch.num_requests,
                )
            )

    def _draft_chains(self, drafts: Sequence[HeadDraft]) -> None:
        """Place by place, in torch: where something is forced or masked, or the kernels cannot do it in one call."""
        together = self._scratch.num_requests
        for i in range(0, len(drafts), together):
            own = drafts[i : i + together]
            self._draw(own, self._fill_in(own))

    def _tree_model(self, drafts: Sequence[HeadDraft]) -> BlockTrees:
        """Trees from the distributions that one pass gave for each place: best first or of a given shape (DDTree,
        arXiv:2604.12989)."""
        return BlockTrees(self._block, drafts, self._fill_in(drafts))

    def _fill_in(self, drafts: Sequence[HeadDraft]) -> list[Block]:
        """Both passes.

        Example: 6 known tokens, block size 4: the features of tokens 3 and 4 are new, and go to slots 4 and 5. Root and
        three masks stand in slots 6 to 9 (scratch behind the request's own), at positions 5 to 8; DFlash's drafts come
        from the last three rows.
        """
        passes, head, block = self._passes, self._head, self._block
        begun = time.perf_counter()
        batch, features, _ = passes.batch([passes.missing(draft) for draft in drafts])
        head.forward(batch, features, passes.kv, CONTEXT)
        inputs: list[RowInput] = []
        wanted: list[int] = []
        lengths: list[int] = []
        end = 0
        for i, draft in enumerate(drafts):
            row, track = draft.row, draft.state.tracks[0]
            track.advance(row.num_tokens)
            masks = (block.options.mask_token,) * (block.rows_of(self._most) - 1)
            tokens = (int(row.token_ids_np[-1]), *masks)
            table = self._scratch.table(i, row.block_table_np)
            inputs.append(RowInput(tokens, row.num_tokens, table, first_key=track.first_key))
            first = end + block.first_row
            wanted += range(first, first + draft.length)
            lengths.append(draft.length)
            end += len(tokens)
        nothing = features.new_empty((end, head.feature_size))
        batch, _, _ = passes.batch([Rows(given, []) for given in inputs], nothing)
        output, logits = head.forward_logits(batch, nothing, passes.kv, wanted, BLOCK)
        hidden = output.hidden[torch.tensor(wanted, device=output.hidden.device)]
        passes.add_time(begun)
        return [
            Block(own, behind)
            for own, behind in zip(torch.split(logits, lengths), torch.split(hidden, lengths), strict=True)
        ]

    def _draw(self, drafts: Sequence[HeadDraft], blocks: Sequence[Block]) -> None:
        """One token of each place, one after the other. Forced tokens take the places of drafts."""
        correction = self._block.correction
        if correction is None:
            logits = torch.cat([b.logits[len(d.tokens) :] for d, b in zip(drafts, blocks, strict=True)])
            draw_in_one_pass(drafts, logits, self._sample_method, self._head.target_ids)
            return
        begun, spent = time.perf_counter(), 0.0
        active = list(zip(drafts, blocks, strict=True))
        state: Tensor | None = None
        step = 0
        while active:
            device = blocks[0].logits.device
            before = [int(d.row.token_ids_np[-1]) if step == 0 else d.tokens[step - 1] for d, _ in active]
            logits, state = correction.correct(
                torch.stack([b.logits[step] for _, b in active]),
                torch.tensor(before, device=device),
                torch.stack([b.hidden[step] for _, b in active]),
                state,
                step,
            )
            drawing = [i for i, (draft, _) in enumerate(active) if len(draft.tokens) == step]
            if drawing:
                drawn = time.perf_counter()
                part = logits if len(drawing) == len(active) else logits[drawing]
                draw_next([active[i][0] for i in drawing], part, self._sample_method, self._head.target_ids)
                spent += time.perf_counter() - drawn
            step += 1
            going = [i for i, (draft, _) in enumerate(active) if draft.length > step]
            if state is not None and len(going) < len(active):
                state = state[going]
            active = [active[i] for i in going]
        self._passes.add_time(begun + spent)


class BlockTrees(RootedTrees):
    """A block's distributions for the nodes of trees: those at one depth differ by what the token before each says,
    if the
    drafter asks for it, and in nothing else. No pass is run.

    Example: one forced token. The children of the forced token are drawn from row 1 of the block, theirs from row 2.
    """

    def __init__(self, head: BlockHead, drafts: Sequence[HeadDraft], blocks: Sequence[Block]) -> None:
        self._correction = head.correction
        self._drafts = drafts
        self._blocks = blocks
        self._depths = [len(draft.tokens) for draft in drafts]  # rows that are used up
        self._states: dict[
            tuple[int, int], Tensor
        ] = {}  # (member, number of a fed node, or -1) -> [r] behind it

    def roots(self) -> Tensor:
        """Logits [R, Vd] behind the root or the last forced token of each."""
        out: list[Tensor] = []
        for member, draft in enumerate(self._drafts):
            state: Tensor | None = None
            before = int(draft.row.token_ids_np[-1])
            logits = self._blocks[member].logits[len(draft.tokens)]
            for place in range(len(draft.tokens) + 1) if self._correction is not None else ():
                logits, state = self._correct(member, place, [before], state)
                logits = logits[0]
                before = draft.tokens[place] if place < len(draft.tokens) else before
            if state is not None:
                self._states[member, -1] = state[0]
            out.append(logits)
        return torch.stack(out)

    def expand(self, levels: Sequence[TreeLevel]) -> Tensor:
        out: list[Tensor] = []
        for level in levels:
            member = level.member
            self._depths[member] += 1
            place = self._depths[member]
            if self._correction is None:
                out.append(self._blocks[member].logits[place].expand(len(level.tokens), -1))
                continue
            state = None
            if self._correction.carries:
                state = torch.stack([self._states[member, parent] for parent in level.parents])
            logits, state = self._correct(member, place, level.tokens, state)
            if state is not None:
                for i, own in enumerate(state):
                    self._states[member, level.start + i] = own
            out.append(logits)
        return torch.cat(out)

    def _correct(
        self, member: int, place: int, before: Sequence[int], state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert self._correction is not None
        block, count = self._blocks[member], len(before)
        return self._correction.correct(
            block.logits[place].expand(count, -1),
            torch.tensor(list(before), device=block.logits.device),
            block.hidden[place].expand(count, -1),
            state,
            place,
        )
