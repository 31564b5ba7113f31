"""What a request drafts with, and the rule that accepts drafts: the engine's choices, overridden by its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.config import SpeculativeConfig
from draftwise.config.trees import DynamicTree, parse_dynamic_tree, parse_tree
from draftwise.engine.facts import Traits
from draftwise.engine.states import WHY_NO_TREES
from draftwise.errors import ConfigError, RequestError, shown, suggest
from draftwise.names import DEFAULT_TREE_NODES, MAX_TREE_NODES, RULES
from draftwise.propose.grammar import GrammarProposer
from draftwise.sampling.params import SamplingParams
from draftwise.structured.grammars import DEFAULT_DRAFTS
from draftwise.types import Speculation
from draftwise.verify.registry import get_rule, verifier_names

_SPECULATION_FIELDS = (
    "method",
    "num_speculative_tokens",
    "speculative_token_tree",
    "speculative_dynamic_tree",
    "rule",
)


class SpeculationChoice:
    """The drafters of one engine, and what its requests may ask of them."""

    def __init__(
        self,
        drafters: Sequence[SpeculativeConfig],
        proposers: Mapping[str, Traits],
        default_method: str,
        most_drafts: int | None,
        elsewhere: bool = False,
    ) -> None:
        """``most_drafts``: the most drafts of a request in a step, for a model with recurrent state; None: no such
        limit. ``elsewhere``: steps are executed in other processes, which lack the rules that this one registers."""
        self._drafters = {d.method: d for d in drafters}
        self._proposers = proposers
        self._default_method = default_method
        self._most_drafts = most_drafts
        self._elsewhere = elsewhere

    def resolve(self, params: SamplingParams) -> Speculation:
        """The engine's default speculation, overridden by the request's ``speculation``, and the acceptance rule.

        Rules: greedy at temperature 0; else what the request or the engine chose; else ``coupled`` for a request
        with a seed (its text must not depend on the draft length, which may follow timing), else ``rejection``.
        """
        given = dict(params.speculation or {})
        for name in given:
            if name not in _SPECULATION_FIELDS:
                raise RequestError(
                    f"speculation: unknown field {shown(name)}{suggest(str(name), _SPECULATION_FIELDS)}"
                )
        method = given.get("method")
        structured = params.structured_outputs is not None
        if method is None:
            method = self._default_method
            if method == "none" and structured:  # what a grammar forces costs nothing to draft
                method = GrammarProposer.name
        loaded = ["none", *self._drafters, *([GrammarProposer.name] if structured else [])]
        if method not in loaded:
            raise RequestError(
                f"speculation: method {shown(method)} is not loaded{suggest(str(method), loaded)}; "
                f"this engine has {', '.join(loaded)}"
            )
        config = self._drafters.get(method)
        rule = self._rule(params, given.get("rule"), config)
        if method == "none":
            return Speculation("none", 0, rule)
        if config is not None and self._proposers[method].prompt_only:
            if params.max_tokens != 1 or params.n != 1:
                raise RequestError(
                    f"method {method!r} reads prompts: max_tokens and n must be 1, got {params.max_tokens} and "
                    f"{params.n}"
                )
            return Speculation(method, 1, rule, whole_prompt=True)
        dynamic = self._dynamic_tree(given, method, config)
        k = given.get("num_speculative_tokens")
        if k is None and dynamic is not None and (config is None or config.speculative_dynamic_tree is None):
            k = DEFAULT_TREE_NODES
        most = self._most_chain(method)
        if k is None:
            k = min(config.num_speculative_tokens if config is not None else DEFAULT_DRAFTS, most)
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= MAX_TREE_NODES:
            raise RequestError(
                f"speculation: num_speculative_tokens must be an integer from 0 to {MAX_TREE_NODES}, got {shown(k)}"
            )
        if k > most:
            raise RequestError(
                f"speculation: num_speculative_tokens: this engine keeps recurrent state for {most} drafts of a "
                f"request, not for {k} (the speculative_config of the engine says how many)"
            )
        if k == 0:
            return Speculation("none", 0, rule)
        if dynamic is not None:
            return Speculation(method, k, rule, dynamic=dynamic)
        tree = given.get("speculative_token_tree", config.speculative_token_tree if config else None)
        if tree is None:
            return Speculation(method, k, rule)
        self._refuse_tree("speculative_token_tree")
        if config is None or not self._proposers[method].drafts_trees:
            raise RequestError(
                f"speculation: method {method!r} drafts chains only, so it cannot take speculative_token_tree"
            )
        try:
            parents, ranks = parse_tree(tree)
        except ConfigError as error:
            raise RequestError(f"speculation: {error}") from None
        nodes = len(parents) if given.get("num_speculative_tokens") is None else k
        if given.get("speculative_token_tree") is not None and nodes != len(parents):
            raise RequestError(
                f"speculation: num_speculative_tokens: {k} contradicts a speculative_token_tree of {len(parents)} nodes"
            )
        parents, ranks = parents[:nodes], ranks[:nodes]
        return Speculation(method, len(parents), rule, parents, ranks)

    def _most_chain(self, method: str) -> int:
        """The number of drafts for which the target and the drafter keep recurrent states, if they have any."""
        own = self._proposers[method].most_drafts if method in self._proposers else None
        limits = [most for most in (own, self._most_drafts) if most is not None]
        return min([MAX_TREE_NODES, *limits])

    def _refuse_tree(self, name: str) -> None:
        if self._most_drafts is not None:
            raise RequestError(f"speculation: {name}: {WHY_NO_TREES}")

    def _dynamic_tree(
        self, given: Mapping[str, Any], method: str, config: SpeculativeConfig | None
    ) -> DynamicTree | None:
        """The request's own dynamic tree, or the drafter's unless the request asks for a static one."""
        name = "speculative_dynamic_tree"
        if given.get(name) is None:
            wants_other = given.get("speculative_token_tree") is not None
            return None if config is None or wants_other else config.speculative_dynamic_tree
        try:
            dynamic = parse_dynamic_tree(given[name])
        except ConfigError as error:
            raise RequestError(f"speculation: {error}") from None
        if dynamic is None:
            return None
        self._refuse_tree(name)
        if given.get("speculative_token_tree") is not None:
            raise RequestError(f"speculation: {name} contradicts speculative_token_tree")
        if config is None or not self._proposers[method].drafts_dynamic_trees:
            raise RequestError(f"speculation: method {method!r} drafts no trees for {name}")
        return dynamic

    def _check_registered(self, rule: str) -> None:
        """A rule that a program registered. Raises RequestError."""
        if self._elsewhere:
            raise RequestError(
                f"speculation: rule {rule!r}: ranks do not have what their engine's process registers"
            )
        try:
            get_rule(rule)  # it may be none
        except ConfigError as error:
            raise RequestError(f"speculation: {error}") from None

    def _rule(self, params: SamplingParams, asked: Any, config: SpeculativeConfig | None) -> str:
        if asked is not None:
            asked = "rejection" if asked == "standard" else asked
            names = verifier_names()
            if asked not in names:
                raise RequestError(
                    f"speculation: unknown rule {shown(asked)}{suggest(str(asked), names)}; valid: {', '.join(names)}"
                )
            if asked not in (*RULES, "greedy"):
                self._check_registered(asked)
        engine = next((d.rule for d in self._drafters.values() if d.rule is not None), None)
        chosen: str | None = asked or (config.rule if config is not None else None) or engine
        if chosen == "synthetic" and engine != "synthetic":
            raise RequestError(
                "speculation: rule 'synthetic' needs an engine with rejection_sample_method='synthetic' and "
                "synthetic_acceptance_length or synthetic_acceptance_rates"
            )
        if chosen == "greedy" and not params.is_greedy:
            raise RequestError("speculation: rule 'greedy' needs temperature 0")
        if params.is_greedy and chosen not in ("typical", "synthetic"):
            return "greedy"
        if chosen is not None:
            return chosen
        return "coupled" if params.seed is not None else "rejection"
