"""Times of steps on a device that is not at hand: bytes over bandwidth or operations over peak, whichever is longer
(the roofline of Williams et al., 2009), with the shares of both that kernels reach.

It knows no kernels, so it is good for orders of magnitude and for comparing settings, not for promises.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftwise.errors import ConfigError
from draftwise.plan.devices import BYTES_PER_WEIGHT, Device
from draftwise.plan.sizes import ModelSizes
from draftwise.plan.times import StepTimes


class Roofline(StepTimes):
    """A model on ``parallel`` devices of one kind."""

    def __init__(
        self,
        device: Device,
        sizes: ModelSizes,
        *,
        weights: str = "bfloat16",
        cache_bytes: float = 2.0,
        parallel: int = 1,
        drafters: Mapping[str, ModelSizes | None] | None = None,
        memory_share: float = 0.9,
    ) -> None:
        """``weights``: format of weights. ``cache_bytes``: of a number of K/V. ``drafters``: method -> its sizes (draft
        model or head), None: it looks things up. ``memory_share``: of the device that weights and cache may take.

        Raises:
            ConfigError: a format that the device does not compute in, or no room for the cache.
        """
        if weights not in device.peak:
            raise ConfigError(
                f"{device.name} does not compute in {weights!r} (it does in {', '.join(device.peak)})"
            )
        if parallel < 1:
            raise ConfigError(f"parallel: expected at least 1, got {parallel}")
        self.device, self.sizes, self.parallel = device, sizes, parallel
        self._drafters = dict(drafters or {})
        self.methods = tuple(self._drafters)
        self._weight_bytes = BYTES_PER_WEIGHT[weights]
        self.kv_bytes = sizes.kv_values * cache_bytes
        """Bytes of a token, on all devices together."""
        drafting = [d for d in self._drafters.values() if d is not None]
        stored = (sizes.weights + sum(d.weights for d in drafting)) * self._weight_bytes
        per_token = self.kv_bytes + sum(d.kv_values * cache_bytes for d in drafting)
        room = device.memory * memory_share * parallel - stored
        self.kv_tokens = int(room / per_token) if per_token else 1 << 40
        if self.kv_tokens < 1024:
            raise ConfigError(
                f"{sizes.name} in {weights} takes {stored / 1e9:.1f} GB; {parallel} x {device.name} have "
                f"{parallel * device.memory * memory_share / 1e9:.1f} GB: too little room for a cache"
            )
        self._bandwidth = device.bandwidth * device.reached_memory * parallel
        self._peak = device.peak[weights] * device.reached_compute * parallel

    def _pass(self, sizes: ModelSizes, rows: int, keys: float, scores: float) -> float:
        """Seconds of a pass over ``rows`` rows. ``keys``: tokens of K/V that are read; ``scores``: rows times keys."""
        read = sizes.read(rows) * self._weight_bytes / self._bandwidth
        products = max(read, 2 * sizes.active * rows / self._peak)
        kv_bytes = self.kv_bytes / max(self.sizes.kv_values, 1) * sizes.kv_values
        attention = max(keys * kv_bytes / self._bandwidth, 4 * sizes.score_width * scores / self._peak)
        return products + attention + self.device.overhead + self._exchange(sizes, rows)

    def _exchange(self, sizes: ModelSizes, rows: int) -> float:
        """Two sums over the devices per layer, each of rows x hidden in bfloat16, sent in a ring."""
        n = self.parallel
        if n == 1:
            return 0.0
        moved = 2 * (n - 1) / n * rows * sizes.hidden * 2
        return 2 * sizes.layers * (moved / self.device.link + 5e-6)

    def _seen(self, sizes: ModelSizes, length: float) -> float:
        return min(length, sizes.window) if sizes.window else length

    def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
        mean = self._seen(self.sizes, context / max(requests, 1))
        return self._pass(self.sizes, rows, requests * mean, rows * mean)

    def draft_time(
        self, method: str, requests: int, nodes: int, catch_up: int = 0, sampled: bool = False
    ) -> float:
        sizes = self._drafters[method]
        if not requests or not nodes:
            return 0.0
        if sizes is None:
            return 2e-6 * requests  # a look-up on the host
        first = self._pass(sizes, 2 * requests + catch_up, 0.0, 0.0)
        return first + (nodes - 1) * self._pass(sizes, requests, 0.0, 0.0)

    def prompt_time(self, start: int, end: int, alone: bool) -> float:
        rows = end - start
        mean = self._seen(self.sizes, (start + end) / 2)
        whole = self._pass(self.sizes, rows, self._seen(self.sizes, end), rows * mean)
        if alone:
            return whole
        # Weights are read for the others in the step anyway.
        shared = self.sizes.read(rows) * self._weight_bytes / self._bandwidth + self.device.overhead
        least = 2 * self.sizes.active * rows / self._peak
        return max(whole - shared, least)

    def reading_time(self, method: str, start: int, end: int) -> float:
        sizes = self._drafters[method]
        if sizes is None:
            return 0.0
        # Its weights are read for the first drafts anyway.
        return max(self._pass(sizes, end - start + 1, 0.0, 0.0) - self._pass(sizes, 1, 0.0, 0.0), 0.0)

    def outside(self, requests: int, rows: int, context: int) -> str | None:
        assert self.kv_tokens is not None
        return f"{context} tokens in a cache of {self.kv_tokens}" if context > self.kv_tokens else None
