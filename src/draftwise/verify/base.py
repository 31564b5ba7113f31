"""Verification: which draft tokens a step keeps, and what follows them. Rules stand beside this file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import ClassVar, NamedTuple

import torch

from draftwise.errors import ConfigError, RequestError, suggest
from draftwise.kv.storage import KVStorage
from draftwise.sampling.logprobs import token_logprobs
from draftwise.sampling.masks import Words
from draftwise.sampling.state import SamplingState
from draftwise.types import IntArray, Proposal, TokenLogprobs, Verification
from draftwise.verify.processing import process_rows
from draftwise.verify.rates import SyntheticAcceptance

__all__ = [
    "BatchRules",
    "PassSlots",
    "Rule",
    "SyntheticAcceptance",
    "VerifyRequest",
    "get_rule",
    "register_verifier",
    "verifier_names",
    "verify_batch",
]


class VerifyRequest(NamedTuple):
    """One request's rows in the logits of a step: the root's row, then one per node, consecutive.

    Row ``first_row`` holds the target's logits after the last committed token, row ``first_row + 1 + i``
    those after node i. Without a proposal the rule draws one token from the root's row.
    """

    state: SamplingState
    proposal: Proposal
    first_row: int
    rule: str
    token_ids_np: IntArray  # [num_tokens] committed tokens, the root last; a view
    masks: Words | None = (
        None  # [1 + nodes, W] int32, packed: what a grammar allows after the root and each node
    )
    pass_row: int = -1  # the root's row in the target's pass; see `PassSlots`

    @property
    def num_rows(self) -> int:
        return 1 + len(self.proposal.tokens)

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, V] a view of its rows."""
        return logits[self.first_row : self.first_row + self.num_rows]

    def row_of(self, node: int) -> int:
        """The logits row after node ``node`` (-1: the root)."""
        return self.first_row + 1 + node


class Rule(ABC):
    """Decides which path of a proposal is kept. One instance serves all requests that name the rule; it
    keeps no state (noise comes from `sampling.noise`, keyed by request, position and step)."""

    lossless: ClassVar[bool]
    """Whether the committed tokens have exactly the target's distribution."""

    @abstractmethod
    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        """``logits`` [M, V] float32, processed (softmax gives p), rows as the requests say. One result each,
        in order. Must not write to ``logits``."""


class PassSlots(NamedTuple):
    """Where the target's pass stored its rows: ``slots`` [T] int64 of ``storage``. Kernels that are given it compact
    accepted paths (see `KVStorage.move`) at once, before anybody has read which they are."""

    storage: KVStorage
    slots: torch.Tensor


class BatchRules(ABC):
    """Several rules as kernels, for all requests of a step at once. They decide like the rules of the same names, up to
    the last bits of sums."""

    names: ClassVar[frozenset[str]]
    """Rules that it has; others are decided one by one in torch."""
    shapes: ClassVar[bool] = False
    """Whether it takes logits before temperature, min_p, top_k and top_p, and does these itself."""
    compacts: ClassVar[bool] = True
    """Whether it compacts accepted paths; else the executor does, as for rules in torch."""

    forced: SyntheticAcceptance | None = None
    """Of benchmarks: what rule ``greedy`` accepts, whatever the target says."""

    def decides(self, state: SamplingState, rule: str) -> bool:
        """Whether it decides a request of this rule."""
        return _effective_rule(state, rule) in self.names

    @abstractmethod
    def verify(
        self,
        logits: torch.Tensor,
        requests: Sequence[VerifyRequest],
        rules: Sequence[str],
        stored: PassSlots | None = None,
    ) -> list[Verification]:
        """As `Rule.verify`; ``rules``: each request's, one of ``names``. With ``stored``, paths are compacted, too."""


RuleFactory = Callable[[], Rule]

_BUILT_IN = {
    "greedy": ("draftwise.verify.greedy", "GreedyRule"),
    "rejection": ("draftwise.verify.rejection", "RejectionRule"),
    "block": ("draftwise.verify.block", "BlockRule"),
    "coupled": ("draftwise.verify.coupled", "CoupledRule"),
    "typical": ("draftwise.verify.typical", "TypicalRule"),
    "synthetic": ("draftwise.verify.synthetic", "SyntheticRule"),
}
_factories: dict[str, RuleFactory] = {}
_rules: dict[str, Rule] = {}

_FORCED = frozenset({"typical", "synthetic"})
"""Rules that mean something else than the argmax walk at temperature 0; all others are `greedy` there."""


def register_verifier(name: str, factory: RuleFactory) -> None:
    """Make a rule available under ``name``. ``factory``: a `Rule` subclass, or anything that makes one, such as
    ``lambda: TypicalRule(epsilon=0.2)``. Raises `ConfigError` if the name is taken by another rule."""
    if name in _BUILT_IN or _factories.get(name, factory) is not factory:
        raise ConfigError(f"a verification rule named {name!r} exists already")
    _factories[name] = factory


def verifier_names() -> tuple[str, ...]:
    """All names that `get_rule` knows."""
    return (*_BUILT_IN, *_factories)


def get_rule(name: str) -> Rule:
    """The shared instance of a rule, imported and made on first use. Raises `ConfigError` if unknown."""
    rule = _rules.get(name)
    if rule is None:
        if name in _BUILT_IN:
            module, attribute = _BUILT_IN[name]
            made: object = getattr(import_module(module), attribute)()
        elif name in _factories:
            made = _factories[name]()
        else:
            valid = verifier_names()
            raise ConfigError(
                f"unknown verification rule {name!r}{suggest(name, valid)}; valid rules: {', '.join(valid)}"
            )
        if not isinstance(made, Rule):
            raise ConfigError(
                f"verification rule {name!r} is a {type(made).__name__}, not a verify.base.Rule"
            )
        rule = _rules[name] = made
    return rule


def verify_batch(
    logits: torch.Tensor,
    requests: Sequence[VerifyRequest],
    *,
    synthetic: SyntheticAcceptance | None = None,
    kernels: BatchRules | None = None,
    stored: PassSlots | None = None,
) -> list[Verification | Exception]:
    """Decide every request of a step. ``logits`` [M, V] float32: the target's raw logits, **overwritten**.

    One result per request, in order: what it commits, or the exception of a request that fails alone (its
    logits processor raised, or its parameters exclude every token, at a position on the accepted path).
    ``synthetic``: acceptance rates for requests under rule ``synthetic``.
    ``kernels``: decide the requests whose rule they have; with ``stored`` they compact the paths of these.
    Raises `ConfigError` for an unknown rule, or rule ``synthetic`` without rates.
    """
    if not requests:
        return []
    if kernels is not None and kernels.shapes:
        return _verify_unshaped(logits, requests, kernels, synthetic, stored)
    plain = True
    for request in requests:
        state = request.state
        if (
            not state.is_greedy
            or state.needs_processing
            or request.masks is not None
            or state.params.logprobs is not None
            or request.rule in _FORCED
        ):
            plain = False
            break
    if plain:
        if kernels is not None:
            return list(kernels.verify(logits, requests, ["greedy"] * len(requests), stored))
        return list(get_rule("greedy").verify(logits, requests))

    raw = {
        r: q.rows_of(logits).clone() for r, q in enumerate(requests) if q.state.params.logprobs is not None
    }
    failures = process_rows(logits, requests)
    groups: dict[str, list[int]] = {}
    names: list[str] = []
    for r, request in enumerate(requests):
        name = _effective_rule(request.state, request.rule)
        names.append(name)
        groups.setdefault(_KERNELS if kernels is not None and name in kernels.names else name, []).append(r)
    results: list[Verification | Exception] = [_NOTHING] * len(requests)
    for name, members in groups.items():
        own = [requests[r] for r in members]
        if name == _KERNELS:
            assert kernels is not None
            decided = kernels.verify(logits, own, [names[r] for r in members], stored)
        else:
            rule = get_rule(name) if name != "synthetic" else _synthetic_rule(synthetic)
            decided = rule.verify(logits, own)
        for r, verification in zip(members, decided, strict=True):
            broken = verification.token_ids[-1] < 0  # nothing could be drawn: not even p has weight
            results[r] = RequestError("the model's logits are not finite") if broken else verification
    if failures:
        _put_failures(results, requests, failures)
    if raw:
        _add_logprobs(results, requests, raw)
    return results


def _verify_unshaped(
    logits: torch.Tensor,
    requests: Sequence[VerifyRequest],
    kernels: BatchRules,
    synthetic: SyntheticAcceptance | None,
    stored: PassSlots | None,
) -> list[Verification | Exception]:
    """`verify_batch` with kernels that shape the distributions themselves. Who decides a request follows from its rule
    alone, so that its tokens depend on nothing else in the batch."""
    rules: list[str] = []
    adjusts = reports = False
    for request in requests:
        state, rule = request.state, request.rule
        rules.append("greedy" if state.is_greedy and rule not in _FORCED else rule)
        if state.adjusts or request.masks is not None:
            adjusts = True
        if state.params.logprobs is not None:
            reports = True
    if not kernels.names.issuperset(rules):
        results: list[Verification | Exception] = [_NOTHING] * len(requests)
        for own in (True, False):  # the others' rules write to rows that are not theirs
            members = [r for r, rule in enumerate(rules) if (rule in kernels.names) is own]
            part = [requests[r] for r in members]
            decided = verify_batch(
                logits, part, synthetic=synthetic, kernels=kernels if own else None, stored=stored
            )
            for r, result in zip(members, decided, strict=True):
                results[r] = result
        return results
    raw: dict[int, torch.Tensor] = {}
    if reports:
        logprobs = [r for r, q in enumerate(requests) if q.state.params.logprobs is not None]
        raw = {r: requests[r].rows_of(logits).clone() for r in logprobs}
    failures = process_rows(logits, requests, shaped=False) if adjusts else {}
    results = [
        result if result.token_ids[-1] >= 0 else RequestError("the model's logits are not finite")
        for result in kernels.verify(logits, requests, rules, stored)
    ]
    if failures:
        _put_failures(results, requests, failures)
    if raw:
        _add_logprobs(results, requests, raw)
    return results


def _put_failures(
    results: list[Verification | Exception],
    requests: Sequence[VerifyRequest],
    failures: Mapping[int, Exception],
) -> None:
    """A request fails that meets a failure (by row of the logits) on its accepted path."""
    for r, request in enumerate(requests):
        result = results[r]
        for node in (-1, *result.path) if isinstance(result, Verification) else ():
            error = failures.get(request.row_of(node))
            if error is not None:
                results[r] = error
                break


_NOTHING = Verification((), ())
_KERNELS = ""  # the group of requests that kernels decide; no rule has this name


def _effective_rule(state: SamplingState, rule: str) -> str:
    return rule if not state.is_greedy or rule in _FORCED else "greedy"


def _synthetic_rule(rates: SyntheticAcceptance | None) -> Rule:
    from draftwise.verify.synthetic import SyntheticRule

    if rates is None:
        raise ConfigError("rule 'synthetic' needs synthetic_acceptance_rates or synthetic_acceptance_length")
    return SyntheticRule(rates)


def _add_logprobs(
    results: list[Verification | Exception], requests: Sequence[VerifyRequest], raw: dict[int, torch.Tensor]
) -> None:
    """One call for all requests; each keeps as many alternatives as it asked for."""
    parts: list[torch.Tensor] = []
    tokens: list[int] = []
    members: list[tuple[int, Verification]] = []
    for r, rows in raw.items():
        result = results[r]
        if isinstance(result, Verification):
            # the token after node i is judged by row i + 1 of the request: path (0, 3) -> rows 0, 1, 4
            parts.append(rows[[0, *(node + 1 for node in result.path)]])
            tokens.extend(result.token_ids)
            members.append((r, result))
    if not members:
        return
    asked = [requests[r].state.params.logprobs or 0 for r, _ in members]
    entries = token_logprobs(torch.cat(parts), tokens, -1 if min(asked) < 0 else max(asked))
    start = 0
    for (r, result), k in zip(members, asked, strict=True):
        own = entries[start : start + len(result.token_ids)]
        start += len(result.token_ids)
        results[r] = result._replace(logprobs=tuple(_first(entry, k) for entry in own))


def _first(entry: TokenLogprobs, k: int) -> TokenLogprobs:
    if k < 0 or len(entry.top_ids) == k:
        return entry
    return replace(entry, top_ids=entry.top_ids[:k], top_logprobs=entry.top_logprobs[:k])
