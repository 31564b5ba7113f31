"""Names of adapters beside those of the model."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.config.lora import LoRARequest
from draftwise.server.engine import ServedEngine
from draftwise.server.errors import APIError, bad_request


class ServedAdapters:
    """Names of adapters beside those of the model."""

    def __init__(self, modules: Sequence[LoRARequest]) -> None:
        self._by_name = {module.lora_name: module for module in modules}
        self._next_id = 1 + max((module.lora_int_id for module in modules), default=0)
        self._loading: set[str] = set()

    def get(self, name: str | None) -> LoRARequest | None:
        """The adapter of a model's name; None: the name is the model's, or unknown."""
        return None if name is None else self._by_name.get(name)

    @property
    def all(self) -> tuple[LoRARequest, ...]:
        return tuple(self._by_name.values())

    async def load(self, engine: ServedEngine, name: str, path: str) -> None:
        """Load an adapter. Raises RequestError if that fails, APIError if the name is taken."""
        if name in self._by_name or name in self._loading:
            raise bad_request(f"an adapter named {name!r} is loaded already", "lora_name")
        self._loading.add(name)
        try:
            module = LoRARequest(name, self._next_id, path)
            self._next_id += 1
            await engine.add_lora(module)
            self._by_name[name] = module
        finally:
            self._loading.discard(name)

    async def unload(self, engine: ServedEngine, name: str) -> None:
        """Unload an adapter; its requests go on with it. Raises APIError (404) for an unknown name."""
        module = self._by_name.pop(name, None)
        if module is None:
            raise APIError(
                404, f"there is no adapter {name[:200]!r}", param="lora_name", code="model_not_found"
            )
        await engine.remove_lora(module.lora_int_id)
