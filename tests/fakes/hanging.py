"""A processor of logits that does not return, once: an engine whose step hangs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HangsOnce:
    """Hangs at the ``at``-th token if the file is there, which it removes: so whoever begins the request again, in
    another process, does not."""

    file: str
    at: int

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) >= self.at and os.path.exists(self.file):
            os.unlink(self.file)
            time.sleep(600)
        return logits
