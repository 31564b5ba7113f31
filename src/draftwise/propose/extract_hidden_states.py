"""Method ``extract_hidden_states``: reads prompts and writes the target's hidden states to files.

For training draft heads (docs/guides/extraction.md). Nothing is drafted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from draftwise.errors import ConfigError
from draftwise.propose.base import Committed, DraftRow, Proposer, ProposerContext
from draftwise.types import EMPTY_PROPOSAL, IntArray, Proposal, StepInput, TargetOutput

logger = logging.getLogger("draftwise")


class ExtractHiddenStatesProposer(Proposer):
    """Keeps the hidden states of a prompt while it is computed, chunk by chunk, and writes them when its last token
    was read. Each request has a file with ``token_ids`` [n] int64 and ``hidden_states`` [n, layers, H] in the
    target's type. These are the inputs of the chosen layers (the number of layers stands for the last one's output,
    before the final norm).

    Every token of the prompt has to pass the target, so these requests take nothing from the prefix cache. The
    file's path is the output's ``kv_transfer_params["hidden_states_path"]``.
    """

    name: ClassVar[str] = "extract_hidden_states"
    observes: ClassVar[bool] = True
    prompt_only: ClassVar[bool] = True

    def __init__(self, layers: Sequence[int], folder: Path) -> None:
        """``layers``: distinct, in the order in which they are written. ``folder`` is made with the first file."""
        self.layers = tuple(layers)
        self.capture_layers = tuple(sorted(self.layers))
        self.folder = folder
        self._output: TargetOutput | None = None  # of the pass that `committed` is about
        self._read: dict[
            int, list[tuple[IntArray, torch.Tensor]]
        ] = {}  # rid -> chunks: token ids, [n, layers, H]

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Take the layers from ``draft_model_config`` and the folder from ``kv_transfer_config``.

        Raises:
            ConfigError: the target has no such layer.
        """
        layers = context.speculative.extracted_layers
        count = context.target_config.num_layers
        wrong = next((layer for layer in layers if layer > count), None)
        if wrong is not None:
            raise ConfigError(
                f"eagle_aux_hidden_state_layer_ids: {wrong} is not a layer of the target, which has {count}; "
                f"0..{count - 1} stand for what enters a layer, {count} for what leaves the last one"
            )
        folder = context.transfer_folder
        if folder is None:
            folder = os.path.join(tempfile.gettempdir(), f"draftwise-hidden-states-{os.getpid()}")
            logger.warning(
                "extract_hidden_states: no kv_transfer_config says where to (shared_storage_path); writing to %s",
                folder,
            )
        return cls(layers, Path(folder))

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [EMPTY_PROPOSAL] * len(rows)

    def observe(self, rids: Sequence[int], batch: StepInput, output: TargetOutput) -> None:
        self._output = output

    def committed(self, parts: Sequence[Committed]) -> None:
        assert self._output is not None, "observe comes first"
        for part in parts:
            rows = torch.from_numpy(part.rows_np.astype(np.int64)).to(self._output.hidden.device)
            states = torch.stack([self._output.captured[layer][rows] for layer in self.layers], dim=1)
            end = part.first_token + len(part.rows_np)
            ids = part.token_ids_np[part.first_token : end].copy()
            self._read.setdefault(part.rid, []).append((ids, states.cpu()))
        self._output = None

    def transfer(self, rid: int) -> Mapping[str, Any] | None:
        chunks = self._read.pop(rid, None)
        if chunks is None:
            return None
        ids_np = np.concatenate([ids for ids, _ in chunks])
        path = (
            self.folder / f"{rid}-{hashlib.blake2b(ids_np.tobytes(), digest_size=6).hexdigest()}.safetensors"
        )
        write_states(path, ids_np, torch.cat([states for _, states in chunks]), self.layers)
        return {"hidden_states_path": str(path)}

    def remove(self, rid: int) -> None:
        self._read.pop(rid, None)


def write_states(
    path: Path,
    token_ids_np: IntArray,
    states: torch.Tensor,
    layers: Sequence[int],
    starts: Sequence[int] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file that is whole or not there: to another name first.

    Args:
        path: its folder is made if it is missing.
        token_ids_np: [n].
        states: [n, layers, H].
        layers: which layers these are; written into the file's metadata.
        starts: where each text begins, and the end of the last: [texts + 1]; None: one text.
        metadata: more of it.

    Raises:
        OSError: the disk is full, the folder may not be written to, ...
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "token_ids": torch.from_numpy(token_ids_np.astype(np.int64)),
        "hidden_states": states.contiguous(),
    }
    if starts is not None:
        tensors["starts"] = torch.tensor(list(starts), dtype=torch.int64)
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, str(part), {"layers": json.dumps(list(layers)), **(metadata or {})})
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
