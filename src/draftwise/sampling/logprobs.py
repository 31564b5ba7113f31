"""Log-probabilities for reports: of the raw distribution, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.types import TokenLogprobs


def token_logprobs(raw_logits: torch.Tensor, token_ids: Sequence[int], top_k: int) -> list[TokenLogprobs]:
    """``raw_logits`` [M, V] float32 -> one entry per row for the token ``token_ids[row]``.

    ``top_k``: alternatives per row, most likely first; 0: none; -1: the whole vocabulary. Each row is computed
    by itself, so that a token's figures do not depend on what else is in the batch.
    """
    if not token_ids:
        return []
    assert raw_logits.shape[0] == len(token_ids)
    vocab = raw_logits.shape[1]
    top_k = vocab if top_k < 0 else min(top_k, vocab)
    logprobs = raw_logits.log_softmax(dim=-1)
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=raw_logits.device)[:, None]
    own = logprobs.gather(1, ids)
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    owns = own.squeeze(1).tolist()
    if not top_k:
        return [TokenLogprobs(int(t), lp, r) for t, lp, r in zip(token_ids, owns, ranks, strict=True)]
    top = logprobs.topk(top_k, dim=-1)
    return [
        TokenLogprobs(int(t), lp, r, tuple(top_ids), tuple(top_lps))
        for t, lp, r, top_ids, top_lps in zip(
            token_ids, owns, ranks, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
