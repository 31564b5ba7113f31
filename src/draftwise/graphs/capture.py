"""The captured passes of a model, and the loops of a drafter, captured together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwise.graphs.buffers import Need, PassBuffers, Shape, Tables
from draftwise.graphs.chains import ChainLoop
from draftwise.graphs.loop import KINDS, Drafter, LoopMemory, deeper_rows
from draftwise.graphs.plans import TreePlan
from draftwise.graphs.trees import TreeLoop
from draftwise.types import ChainDraws, StepInput, TreeDraws


@dataclass(frozen=True, slots=True)
class Captures:
    """``passes``, and loops of ``steps`` drafts (0: none), or of the tree ``tree``, for the requests of ``loops``,
    whose first pass has as many rows as there; ``pieces``: numbers of rows of passes without attention, see
    `graphs.pieces`. ``mask``: the token with which a draft model drafts all tokens in one pass; None: it does not.
    ``block``: rows of a request in a `BlockPass`; 0: there is none. ``adapted``: each whole pass is captured twice, for
    requests without and with adapters."""

    passes: tuple[Shape, ...]
    loops: tuple[Shape, ...] = ()
    steps: int = 0
    tree: TreePlan | None = None
    pieces: tuple[int, ...] = ()
    mask: int | None = None
    block: int = 0
    adapted: bool = False

    @property
    def max_requests(self) -> int:
        return max((shape.requests for shape in (*self.passes, *self.loops)), default=0)

    @property
    def max_keys(self) -> int:
        return max((shape.keys for shape in (*self.passes, *self.loops)), default=0)

    @property
    def draws(self) -> int:
        """Distributions that a request's drafts may be drawn from."""
        return self.steps if self.tree is None else max(self.steps, len(self.tree.opened))

    @property
    def fed(self) -> int:
        """Rows of a request that loops feed without regard to how many drafts are verified; 0: none are."""
        tree = self.tree
        if self.block:
            return self.block
        return 0 if tree is None or tree.shape is not None else max(tree.top_k * (tree.depth - 1), 1)

    @property
    def count(self) -> int:
        """Passes and loops, each of one graph or in pieces."""
        each = (len(KINDS) if self.steps else 0) + (0 if self.tree is None else len(self.tree.kinds))
        return len(self.passes) * (1 + self.adapted) + each * len(self.loops) + len(self.pieces)

    def __str__(self) -> str:
        """In words. Example: ``12 whole passes of 1..80 rows, 9 passes of 1..128 rows in pieces``."""
        parts = []
        if self.passes:
            sizes = [shape.size for shape in self.passes]
            twice = ", with and without adapters" if self.adapted else ""
            parts.append(f"{len(sizes)} whole passes of {min(sizes)}..{max(sizes)} rows{twice}")
        if self.pieces:
            most = max(self.pieces)
            parts.append(f"{len(self.pieces)} passes of {min(self.pieces)}..{most} rows in pieces")
        if self.loops:
            kind = "trees" if self.tree is not None else f"{self.steps} drafts"
            counts = [shape.requests for shape in self.loops]
            loops = self.count - len(self.passes) * (1 + self.adapted) - len(self.pieces)
            parts.append(f"{loops} loops of {kind} for {min(counts)}..{max(counts)} requests")
        return ", ".join(parts) or "nothing"

    def loop_bytes(self, vocab_size: int, feature_bytes: int = 0, depths: int = 1) -> int:
        """Bytes of a `LoopMemory`, and of what each loop of a tree keeps; ``feature_bytes``: of one row's features;
        ``depths``: layers of a head that take turns."""
        if not self.loops:
            return 0
        requests = max(shape.requests for shape in self.loops)
        rows = max(shape.size for shape in self.loops)
        shared = 8 * vocab_size + requests * (8 * self.steps + 4 * self.draws * vocab_size)
        shared += (rows + sum(deeper_rows(self.loops, depths - 1))) * feature_bytes
        if self.tree is None:
            return shared
        return shared + len(self.tree.kinds) * sum(self.tree.loop_bytes(s.requests) for s in self.loops)


@dataclass(frozen=True, slots=True)
class Loops:
    """Captured ones, the smallest first."""

    chains: list[ChainLoop] = field(default_factory=list)
    trees: list[TreeLoop] = field(default_factory=list)

    def chain_for(self, batch: StepInput, steps: int, draws: ChainDraws | None) -> ChainLoop | None:
        """The smallest one that drafts for a batch; its tensors must lie on the host."""
        if batch.token_ids.device.type != "cpu":
            return None
        need = Need.of(batch)
        return next((loop for loop in self.chains if loop.takes(need, steps, draws)), None)

    def tree_for(self, batch: StepInput, draws: Sequence[TreeDraws]) -> TreeLoop | None:
        """As `chain_for`."""
        if batch.token_ids.device.type != "cpu":
            return None
        need = Need.of(batch)
        return next((loop for loop in self.trees if loop.takes(need, draws)), None)


def capture_loops(captures: Captures, drafter: Drafter, tables: Tables) -> Loops:
    """Capture the loops of all shapes. The largest is captured first: the others then fit into its memory."""
    found = Loops()
    if not captures.loops:
        return found
    tree = captures.tree
    memory = LoopMemory(captures.loops, captures.steps, drafter, tables.backend.device, captures.draws)
    for shape in sorted(captures.loops, key=lambda s: (s.size, s.keys), reverse=True):
        rows = PassBuffers(shape, tables)
        if captures.steps:
            for kind in KINDS:
                found.chains.insert(0, ChainLoop(kind, drafter, rows, memory))
                found.chains[0].capture()
        if tree is not None:
            for kind in tree.kinds:
                found.trees.insert(0, TreeLoop(tree, kind, drafter, rows, memory))
                found.trees[0].capture()
    return found
