"""The contract of a proposer (drafter). Implementations stand beside this file and are found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from draftwise.config import SpeculativeConfig
from draftwise.graphs.seats.drafter import SeatedDrafter
from draftwise.graphs.seats.lookup import LookUp
from draftwise.graphs.setup import GraphSetup
from draftwise.kernels.ranks import Ranks
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel, ModelConfig
from draftwise.sampling.draw import DraftSampleMethod
from draftwise.sampling.state import SamplingState
from draftwise.structured.cursor import Cursor
from draftwise.types import IntArray, Proposal, Speculation, StepInput, TargetOutput


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What an engine offers to `Proposer.create`. The number of cache blocks is known later, see
    `Proposer.allocate`."""

    speculative: SpeculativeConfig  # the entry of speculative_config that asks for it
    target_config: ModelConfig
    target_model: DecoderModel
    block_size: int  # tokens per block
    dtype: torch.dtype  # of the target
    device: torch.device
    max_model_len: int  # tokens; no position reaches it
    max_num_seqs: int  # requests in one call of `propose`, at most
    vocab_size: int  # of the target; draft tokens are below it
    tokenizer: Any = None  # of the target (Transformers); None: the engine has none
    transfer_folder: str | None = None  # where hidden states are written to (kv_transfer_config)
    target_path: str | None = None  # where the target was loaded from: folder or hub id
    target_revision: str | None = None
    graphs: GraphSetup | None = None  # captures a drafter's passes; None: nothing is captured
    ranks: Ranks | None = None  # the processes that share the target; None: it is not shared

    @property
    def max_draft_len(self) -> int:
        """All positions that the drafter is fed are smaller: ``max_model_len``, or less if the user says so."""
        return min(self.speculative.max_model_len or self.max_model_len, self.max_model_len)

    @property
    def sample_method(self) -> DraftSampleMethod:
        """How the drafter picks tokens when the target samples."""
        return "greedy" if self.speculative.draft_sample_method == "greedy" else "probabilistic"


@dataclass(slots=True)
class DraftRow:
    """A proposer's view of one request, read-only. Arrays are views: read them during the call, keep copies if
    needed.

    The last token of ``token_ids_np`` is the next step's root; its K/V is in no storage yet. A node of depth d
    stands at position ``num_tokens - 1 + d``.
    """

    rid: int
    token_ids_np: IntArray  # [num_tokens] committed tokens, prompt first
    num_prompt: int
    budget: int  # most nodes to propose, >= 1
    max_depth: int  # no node deeper than this: model length and max_tokens; >= 1
    speculation: Speculation
    sampling: SamplingState
    block_table_np: IntArray  # [blocks] block ids reserved for the request, lookahead included
    filled: int  # leading tokens whose K/V (or other per-token state) this proposer has in `block_table_np`
    grammar: Cursor | None = None
    """The grammar of a structured output. A proposer that draws from a distribution must draw under
    ``grammar.mask(path)`` (pass it as `LogitsRow.mask`): dropping drawn tokens would not be lossless. Point masses
    may ignore it: forbidden nodes are pruned."""
    forced: tuple[int, ...] = ()
    """Tokens that must come next, ``budget`` at most. A proposal of point masses that does not begin with them is
    replaced by them; a proposal may go on behind them."""
    tokens_at: int = 0
    """Where ``token_ids_np`` (int32, contiguous) lies in memory, if that is known: native calls are told it of many
    requests, and asking numpy takes a microsecond. 0: ask (`kernels.cpu.attention.address`)."""
    blocks_at: int = 0
    """The same of ``block_table_np``."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_np)

    def with_budget(self, budget: int) -> DraftRow:
        """The same with another budget; `dataclasses.replace` takes five times as long."""
        return DraftRow(
            self.rid,
            self.token_ids_np,
            self.num_prompt,
            budget,
            self.max_depth,
            self.speculation,
            self.sampling,
            self.block_table_np,
            self.filled,
            self.grammar,
            self.forced,
            self.tokens_at,
            self.blocks_at,
        )


@dataclass(slots=True)
class Committed:
    """Tokens of one request that the target has read in this step and that stay: a chunk of the prompt, or the root
    and the accepted nodes behind it. Rejected nodes and the new last token, which was not read yet, are not included.

    Example: rows 5..9 of the batch are a root (token 20) with a chain of four drafts, of which two were accepted:
    tokens 20, 21 and 22 are committed by rows 5, 6 and 7.
    """

    rid: int
    tokens_np: IntArray  # [at least num_tokens] known tokens first; a view
    num_tokens: int  # known ones, the new last one included
    first_token: int
    rows: Sequence[
        int
    ]  # [n] rows of the batch given to `observe`, of tokens first_token, first_token + 1, ...
    block_table_np: IntArray  # [blocks] as `DraftRow.block_table_np`
    filled: int  # as `DraftRow.filled`

    @property
    def token_ids_np(self) -> IntArray:
        """[num_tokens] all known tokens; a view."""
        return self.tokens_np[: self.num_tokens]

    @property
    def rows_np(self) -> IntArray:
        """[n] ``rows``, as an array."""
        return np.array(self.rows, np.int32)


class Proposer(ABC):
    """Guesses the target's next tokens. One instance per entry of ``speculative_config``, used for every request that
    names its method.

    A proposer that keeps per-token device state (``has_storage``) indexes it by the target's block table.
    `DraftRow.filled` says how much of it is valid; the proposer catches up on the rest itself. The runner tracks
    validity: after `propose` it records `filled_after` for the row.

    Behind ``filled`` it may rely only on what it wrote itself for tokens that were already committed, each in the
    slot of its own position, and only until `trimmed` says that the slots went away. Drafts of a chain
    that stay valid are counted in (`drafts_stored`). A tree's nodes do not stand where their path will be, and nobody
    moves them: after a step the target's storage is compacted, a drafter's is not. A drafter of trees reads the
    accepted path again, in the pass that reads the new last token.

    If a hook raises or gives an invalid answer (a wrong number of proposals, a token outside of the vocabulary, a q
    that is not a distribution, more tokens filled than there are), the requests of that call lose their speculation:
    they are decoded plainly from then on, and only `remove` is called for them. The log says it once, and
    ``llm.stats().drafter_failures`` counts it. So it is with `SystemExit` outside of the program's main thread. Only a
    failed `transfer` fails its request, and an error while the engine is built ends that.
    """

    name: ClassVar[str]
    capture_layers: tuple[int, ...] = ()
    """Target layers whose entering hidden states `observe` wants, see `TargetOutput.captured`."""
    has_storage: ClassVar[bool] = False
    drafts_trees: ClassVar[bool] = False
    """Whether `Speculation.tree` is honoured; other proposers are refused a tree by name."""
    drafts_dynamic_trees: ClassVar[bool] = False
    """The same for `Speculation.dynamic`."""
    evident: ClassVar[bool] = False
    """Whether the size of a proposal follows from committed tokens alone and shows its quality (a longer match). The
    controller may then use it to decide what to verify. It must be False if drawn tokens decide where a proposal
    stops: using the size would be lossy.
    """
    observes: ClassVar[bool] = False
    """Whether `observe` is called though no layer is captured."""
    prompt_only: ClassVar[bool] = False
    """Whether its requests only read their prompt: every token passes the target, one token is generated, and
    `transfer` returns the result."""
    most_drafts: int | None = None
    """Most tokens of a chain that it can draft, if it carries recurrent state; its requests may ask for no more."""
    forward_time: float = 0.0
    """Seconds spent in this proposer's own forward passes; read and reset by the runner every step."""

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Build the proposer for an engine. A class that needs settings or models takes them from ``context``."""
        return cls()

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        """One proposal per row, in order (empty ones allowed), at most ``budget`` nodes, ``max_depth`` deep.

        Tokens must be drawn from the very distribution that the proposal reports (see `Proposal.q`), with
        noise of the DRAFT stream (or, for rule ``coupled``, the shared stream).
        Raising ends only the speculation of the rows in the call. Several rows are asked again one by one, to find
        the cause.
        """

    def filled_after(self, row: DraftRow) -> int:
        """After `propose`: leading *committed* tokens of the row whose storage is valid now. In lookahead
        slots lie those of drafts; see `drafts_stored`."""
        return row.filled

    def drafts_stored(self, row: DraftRow) -> int:
        """After `propose` of a chain: draft tokens whose storage was written to their own lookahead slots, so
        that it stays valid if they are accepted."""
        return 0

    def stored_after(self, rows: Sequence[DraftRow]) -> tuple[Sequence[int], Sequence[int]] | None:
        """`filled_after` and `drafts_stored` of all rows of the latest `propose`, side by side; None: call them row
        by row."""
        return None

    def observe(self, rids: Sequence[int], batch: StepInput, output: TargetOutput) -> None:  # noqa: B027
        """Called after each target pass with all its rows (request r is ``rids[r]``), before verification, if a request
        takes part that uses the proposer."""

    def committed(self, parts: Sequence[Committed]) -> Sequence[int] | None:
        """Called once per step after verification, if the proposer observes, with the tokens that the step committed.
        It covers requests that use its method and are followed (`RowPlan.follow`). Later parts of the other requests
        may begin behind tokens that it was not told of. Paths of trees are not compacted yet: slots are
        still those of the pass.

        Returns:
            Per part the leading tokens whose storage is valid now; None: as before.
        """
        return None

    def transfer(self, rid: int) -> Mapping[str, Any] | None:
        """Called once the prompt of a request is committed, if the proposer is ``prompt_only``. Returns the output's
        ``kv_transfer_params``. Raising fails the request."""
        return None

    def trimmed(self, rid: int, num_tokens: int) -> None:  # noqa: B027
        """Called for proposers with storage: storage behind the first ``num_tokens`` tokens of a request was
        freed."""

    def settle(self, rid: int, token_ids_np: IntArray, block_table_np: IntArray) -> int:
        """Called before `leaving` if the proposer has storage and the request used its method: the tokens
        ``token_ids_np`` [n], which the target has read, may stay in the prefix cache. Answers how many of them have
        valid storage, after computing what is missing if that is cheap. ``block_table_np`` [blocks] reaches so far."""
        return 0

    def leaving(self, rid: int, token_ids_np: IntArray) -> None:  # noqa: B027
        """Called before `remove` with all tokens of the request (int32 [n], a view; prompt first), those of its last
        step included, which `propose` has not seen. It may have finished, or come back with the same ``rid``."""

    def remove(self, rid: int) -> None:  # noqa: B027
        """Called when a request has left the executor (finished, cancelled or preempted): drop its state."""

    def forget(self) -> None:  # noqa: B027
        """Drop everything learned from past requests, as if the engine had just started."""

    def memory_per_block(self) -> int:
        """Bytes of storage per block of tokens, counted into the cache plan."""
        return 0

    def memory_fixed(self) -> int:
        """Bytes of storage besides, whatever the number of blocks, such as scratch space for trees."""
        return 0

    def memory_static(self) -> int:
        """Bytes that captured passes of its models will keep, on a GPU."""
        return 0

    def target_scratch_blocks(self) -> int:
        """Blocks behind those of the cache that the target's storage should have for this proposer to write to, while
        it is in `propose`."""
        return 0

    def seated(self) -> SeatedDrafter | LookUp | None:
        """Called once, after `allocate`: the proposer's part in steps that stay on the device; None: it has none. A
        `LookUp` says that the device finds the drafts itself, in texts: `propose` is not called then."""
        return None

    def allocate(self, num_blocks: int) -> None:  # noqa: B027
        """Make the storage, once, when the number of blocks of the cache is known."""

    def use_target_storage(self, storage: KVStorage) -> None:  # noqa: B027
        """Called once, after `allocate`, with the K/V of the target. A proposer may read the committed tokens' slots
        (all but the root's are written when it drafts) and write to lookahead slots, which the next verification
        overwrites."""
