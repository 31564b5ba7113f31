"""Checkpoints whose layers have several forms: groups of layers, each named by targets."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from draftwise.errors import ModelLoadError
from draftwise.quantization.checkpoint import CheckpointFormat, LayerwiseFormat
from draftwise.quantization.scheme import Scheme


@dataclass(frozen=True)
class GroupsFormat(LayerwiseFormat):
    """compressed-tensors with several config groups. A layer belongs to the first group one of whose targets is its
    name, a pattern for it (``re:...``), or, failing these, its class (``Linear``)."""

    groups: tuple[tuple[tuple[str, ...], CheckpointFormat], ...]
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " and ".join(dict.fromkeys(form.name for _, form in self.groups))

    def of(self, bases: Sequence[str], names: Collection[str]) -> CheckpointFormat | None:
        forms = {self._form_of(base) for base in bases}
        quantised = {form for form in forms if form is not None and form.of(bases[:1], names) is not None}
        if len(forms) > 1 and quantised:
            raise ModelLoadError(
                f"{', '.join(bases)} are quantised in different forms; that is not supported"
            )
        form = next(iter(forms))
        return None if form is None else form.of(bases, names)

    def renamed(self, origins: Mapping[str, str]) -> CheckpointFormat:
        return replace(self, origins=origins)

    def _form_of(self, base: str) -> CheckpointFormat | None:
        base = self.origins.get(base, base)
        for targets, form in self.groups:
            for target in targets:
                pattern = target.removeprefix("re:")
                if target.startswith("re:") and re.match(pattern, base):
                    return form
                if base == target or base.endswith(f".{target}"):
                    return form
        return next((form for targets, form in self.groups if "Linear" in targets), None)

    def unneeded(self, bases: Sequence[str]) -> set[str]:
        return set().union(*(form.unneeded(bases) for _, form in self.groups))

    def check_scheme(self, scheme: Scheme, name: str | None) -> None:
        for _, form in self.groups:
            form.check_scheme(scheme, name)
