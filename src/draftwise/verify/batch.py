"""Decides all requests of a step together: each by its rule, or by kernels that have the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from draftwise.errors import ConfigError, RequestError
from draftwise.sampling.logprobs import token_logprobs
from draftwise.types import TokenLogprobs, Verification
from draftwise.verify.base import FORCED, BatchRules, PassSlots, Rule, VerifyRequest, effective_rule
from draftwise.verify.contained import decided_alone
from draftwise.verify.processing import process_rows
from draftwise.verify.rates import SyntheticAcceptance
from draftwise.verify.registry import get_rule, is_foreign
from draftwise.verify.synthetic import SyntheticRule


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
            or request.rule in FORCED
        ):
            plain = False
            break
    if plain:
        if kernels is not None:
            return _checked(kernels.verify(logits, requests, ["greedy"] * len(requests), stored), requests)
        return _checked(get_rule("greedy").verify(logits, requests), requests)

    raw = {
        r: q.rows_of(logits).clone() for r, q in enumerate(requests) if q.state.params.logprobs is not None
    }
    failures = process_rows(logits, requests)
    groups: dict[str, list[int]] = {}
    names: list[str] = []
    for r, request in enumerate(requests):
        name = effective_rule(request.state, request.rule)
        names.append(name)
        groups.setdefault(_KERNELS if kernels is not None and name in kernels.names else name, []).append(r)
    results: list[Verification | Exception] = [_NOTHING] * len(requests)
    decided: Sequence[Verification | Exception]
    for name, members in groups.items():
        own = [requests[r] for r in members]
        if name == _KERNELS:
            assert kernels is not None
            decided = kernels.verify(logits, own, [names[r] for r in members], stored)
        elif is_foreign(name):
            decided = decided_alone(get_rule(name), name, logits, own)
        else:
            rule = get_rule(name) if name != "synthetic" else _synthetic_rule(synthetic)
            decided = rule.verify(logits, own)
        for r, result in zip(members, _checked(decided, own), strict=True):
            results[r] = result
    if failures:
        _put_failures(results, requests, failures)
    if raw:
        _add_logprobs(results, requests, raw)
    return results


def _checked(
    decided: Sequence[Verification | Exception], requests: Sequence[VerifyRequest]
) -> list[Verification | Exception]:
    """The decisions, with an error in place of one whose last token is -1: its row is no distribution."""
    return [
        _not_finite(request) if isinstance(one, Verification) and one.token_ids[-1] < 0 else one
        for one, request in zip(decided, requests, strict=True)
    ]


def _not_finite(request: VerifyRequest) -> RequestError:
    processors = request.state.params.logits_processors
    if not processors:
        return RequestError("the model's logits are not finite")
    names = " or ".join(repr(getattr(fn, "__name__", fn)) for fn in processors)
    return RequestError(
        f"the logits are not finite: the likely cause is logits processor {names}, else the model"
    )


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
        rules.append("greedy" if state.is_greedy and rule not in FORCED else rule)
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
    results = _checked(kernels.verify(logits, requests, rules, stored), requests)
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
    """End accepted paths before the first error (by row of the logits). At the root it fails the request.

    A path that ends earlier is right, too: the text may end with its last token (a stop), and then nobody asks for the
    row behind it. If it goes on, the next step has the error at its root. Example: the path (0, 2) with tokens
    (5, 6, 7) and an error behind node 2 becomes (0,) with (5, 6).
    """
    for r, request in enumerate(requests):
        result = results[r]
        for depth, node in enumerate((-1, *result.path) if isinstance(result, Verification) else ()):
            error = failures.get(request.row_of(node))
            if error is None:
                continue
            assert isinstance(result, Verification)
            results[r] = Verification(result.path[: depth - 1], result.token_ids[:depth]) if depth else error
            break


_NOTHING = Verification((), ())
_KERNELS = ""  # the group of requests that kernels decide; no rule has this name


def _synthetic_rule(rates: SyntheticAcceptance | None) -> Rule:
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
