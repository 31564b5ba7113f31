"""How far a draft model gets: chains drafted and verified as an engine would, without an engine.

Every step recomputes the whole text: simple, slow, and independent of everything the engine does, so that its
numbers can be held against the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROUND = 32

LogitsFn = Callable[[Tensor], Tensor]
"""ids (batch, tokens) int64 -> logits (batch, tokens, vocab), causal, positions from 0."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The results of drafting chains of one length, over all prompts."""

    temperature: float
    num_steps: int
    accepted_per_position: tuple[int, ...]
    """Steps in which the draft at this position was accepted."""
    distinct_share: float
    """Distinct tokens over tokens generated, the mean over prompts: low means loops, which flatter drafting."""

    @property
    def mean_length(self) -> float:
        """Tokens committed per step: one and the accepted ones."""
        return 1 + sum(self.accepted_per_position) / max(1, self.num_steps)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers that are reported."""
        rates = [round(count / max(1, self.num_steps), 4) for count in self.accepted_per_position]
        return {
            "mean_acceptance_length": round(self.mean_length, 3),
            "accepted_per_position": rates,
            "distinct_share": round(self.distinct_share, 3),
            "steps": self.num_steps,
        }


@torch.no_grad()
def measure_acceptance(
    target: LogitsFn,
    draft: LogitsFn,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 128,
    num_draft: int = 4,
    temperature: float = 0.0,
    seed: int = 0,
    eos_id: int = 0,
) -> Acceptance:
    """Generate `num_tokens` after each prompt with the draft model's chains and count what is accepted.

    At temperature 0 a draft is accepted if it is the target's argmax; above, by rejection sampling. A prompt
    is finished by its end-of-text token too.

    Args:
        target, draft: give logits for token ids; `DemoLlama` does.
        prompts: token ids; lengths may differ.
        num_draft: length of every chain.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = [list(prompt) for prompt in prompts]
    starts = [len(prompt) for prompt in prompts]
    limits = [start + num_tokens for start in starts]
    active = list(range(len(texts)))
    accepted = [0] * num_draft
    steps = 0
    while active:
        chains: list[list[int]] = [[] for _ in active]
        q_rows: list[Tensor] = []
        for _ in range(num_draft):
            rows = [texts[i] + chain for i, chain in zip(active, chains, strict=True)]
            q = _probabilities(_last_logits(draft, rows, 1)[:, 0], temperature)
            q_rows.append(q)
            for chain, token in zip(chains, _draw(q, generator), strict=True):
                chain.append(token)
        rows = [texts[i] + chain for i, chain in zip(active, chains, strict=True)]
        p_all = _probabilities(_last_logits(target, rows, num_draft + 1), temperature)
        for row, i in enumerate(active):
            q_row = torch.stack([q[row] for q in q_rows])
            kept, token = _verify(p_all[row], q_row, chains[row], generator)
            for position in range(kept):
                accepted[position] += 1
            steps += 1
            texts[i] += [*chains[row][:kept], token]
            if eos_id in texts[i][starts[i] :]:
                limits[i] = 0
        active = [i for i in active if len(texts[i]) < limits[i]]
    shares = [len(set(t[s:])) / max(1, len(t) - s) for t, s in zip(texts, starts, strict=True)]
    return Acceptance(temperature, steps, tuple(accepted), sum(shares) / max(1, len(shares)))


def _last_logits(model: LogitsFn, rows: list[list[int]], count: int) -> Tensor:
    """Return the logits (rows, count, vocab) float32 at each row's last `count` tokens; rows are padded right."""
    # Rounded: the matrix library keeps a plan, and memory, for every shape it meets.
    longest = -(-max(map(len, rows)) // _ROUND) * _ROUND
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    logits = model(ids)
    return torch.stack([logits[i, len(row) - count : len(row)] for i, row in enumerate(rows)]).float()


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits / temperature, -1)


def _draw(probabilities: Tensor, generator: torch.Generator) -> list[int]:
    drawn: list[int] = torch.multinomial(probabilities, 1, generator=generator)[:, 0].tolist()
    return drawn


def _verify(p: Tensor, q: Tensor, chain: list[int], generator: torch.Generator) -> tuple[int, int]:
    """Return (drafts kept, next token) by rejection sampling; p: (K + 1, vocab), q: (K, vocab)."""
    for position, token in enumerate(chain):
        chance = float(p[position, token] / q[position, token])
        if float(torch.rand((), generator=generator)) >= chance:
            rest = (p[position] - q[position]).clamp_min(0)
            return position, _draw(rest[None], generator)[0]
    return len(chain), _draw(p[len(chain)][None], generator)[0]
