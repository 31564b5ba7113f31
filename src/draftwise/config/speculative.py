"""`SpeculativeConfig`: one drafter, as the user's ``speculative_config`` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from draftwise.config import coerce as to
from draftwise.config.coerce import option
from draftwise.config.contradictions import check_fields
from draftwise.config.extraction import extracted_layers
from draftwise.config.heads import head_defaults
from draftwise.config.hybrid import check_inner, check_match_length
from draftwise.config.methods import detect_method, read_config, resolve_method
from draftwise.config.speculative_fields import choices, dynamic_tree, ranges, tree_paths, weight_format
from draftwise.config.synthetic import check_synthetic, rates_of_length
from draftwise.config.trees import DynamicTree
from draftwise.errors import ConfigError, suggest
from draftwise.names import (
    CAPTURED_METHODS,
    DEFAULT_TREE_NODES,
    HEAD_METHODS,
    MAX_TREE_NODES,
    MODELLESS_METHODS,
    RULE_ALIASES,
    RULES,
)


class _Unset(int):
    """An int that was not given; told from a given one by identity, and never left in a resolved config."""


_UNSET: int = _Unset(0)
_DEFAULT_NUM_TOKENS = {
    "ngram": 5,
    "suffix": 16,
    "hybrid": 16,
    "eagle3": 5,
    "mtp": 3,
    "extract_hidden_states": 1,
}
"""Others: 4."""


def _inner_drafter(name: str, value: Any) -> SpeculativeConfig:
    """``hybrid_drafter``: the drafter inside a hybrid one."""
    try:
        inner = SpeculativeConfig.from_dict(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    # A head may bring a tree along; that is no contradiction.
    check_inner(name, inner.method, {} if value is inner else to.mapping(name, value))
    return inner


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """One drafter. Validated, and missing values resolved, on construction.

    ``SpeculativeConfig.from_dict`` takes the same fields as a dict or a JSON object.

    Raises:
        ConfigError: a value is out of range, a field contradicts another, or asks for what is not supported
            yet.
    """

    method: str = option(
        "auto",
        to.string,
        "ngram, suffix, draft_model, eagle, eagle3, medusa, mtp, synthetic, a registered name or a dotted path",
    )
    model: str | None = option(None, to.string, "the draft model or head: local folder or hub id")
    num_speculative_tokens: int = option(_UNSET, to.integer(1, MAX_TREE_NODES), "draft tokens per step (K)")
    draft_tensor_parallel_size: int | None = option(
        None, to.integer(1), "ranks of the draft model (the target's)"
    )
    max_model_len: int | None = option(
        None, to.size(), "the drafter's context; beyond it drafting is skipped"
    )
    quantization: str | None = option(
        None, weight_format, "weight format of the draft model, as the engine's"
    )
    revision: str | None = option(None, to.string, "revision of the draft model on the hub")
    lora_path: str | None = option(
        None, to.string, "draft_model: a LoRA adapter that is merged into it: folder or hub id"
    )
    enforce_eager: bool = option(False, to.boolean, "do not capture the drafter in graphs")
    draft_num_layers: int | None = option(
        None, to.integer(1), "early_exit: layers of the target that draft (a quarter of them)"
    )
    hybrid_drafter: SpeculativeConfig | None = option(
        None, _inner_drafter, "hybrid: speculative_config of the model that drafts where nothing matches"
    )
    hybrid_lookup: str | None = option(
        None, to.choice("suffix", "ngram"), "hybrid: what is looked up first, suffix or ngram (suffix)"
    )
    hybrid_min_match: int | None = option(
        None, to.integer(1, 1024), "hybrid: tokens of a match that beats the model (4)"
    )
    prompt_lookup_max: int | None = option(
        None, to.integer(1), "ngram: longest suffix looked up (5, or the shortest)"
    )
    prompt_lookup_min: int | None = option(
        None, to.integer(1), "ngram: shortest suffix looked up (2, or the longest)"
    )
    parallel_drafting: bool = option(False, to.boolean, "draft all tokens in one pass (PARD, P-EAGLE)")
    use_heterogeneous_vocab: bool = option(False, to.boolean, "allow a draft model with another vocabulary")
    disable_padded_drafter_batch: bool = option(False, to.boolean, "do not pad the drafter's batch")
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = option(
        None, ranges, "[(from, to, K)]: K by the number of running requests"
    )
    suffix_decoding_max_tree_depth: int | None = option(
        None, to.integer(2, 1024), "suffix: longest match and draft together (24)"
    )
    suffix_decoding_max_cached_requests: int | None = option(
        None, to.integer(0), "suffix: past outputs kept; 0: none (10000)"
    )
    suffix_decoding_max_spec_factor: float | None = option(
        None, to.number(0, 1e6), "suffix: draft tokens per token of match (1)"
    )
    suffix_decoding_min_token_prob: float | None = option(
        None, to.number(0, 1), "suffix: least probability of a draft token (0.1)"
    )
    rejection_sample_method: str | None = option(
        None, to.choice(*RULES, aliases=RULE_ALIASES), "standard, block, coupled, typical or synthetic"
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None, to.sequence_of(to.number(0, 1), "a list of rates"), "forced acceptance per draft position"
    )
    synthetic_acceptance_length: float | None = option(
        None, to.number(1, MAX_TREE_NODES + 1), "forced mean acceptance length, in [1, K + 1]"
    )
    draft_sample_method: str = option(
        "probabilistic", to.choice("probabilistic", "greedy"), "how a drafter picks its tokens when sampling"
    )
    speculative_token_tree: tuple[tuple[int, ...], ...] | None = option(
        None, tree_paths, "static tree: list of paths of child ranks"
    )
    speculative_dynamic_tree: DynamicTree | None = option(
        None,
        dynamic_tree,
        'tree shaped by the drafter\'s confidence: true, or {"top_k": 4, "depth": 6}; '
        "num_speculative_tokens of its nodes are verified",
    )
    medusa_choices: tuple[tuple[int, ...], ...] | None = option(
        None, choices, "medusa: speculative_token_tree under the name that Medusa gives it"
    )
    draft_model_config: dict[str, Any] | None = option(None, to.mapping, "settings of extract_hidden_states")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | str | SpeculativeConfig) -> Self:
        """Build from a mapping or the JSON text of one; None stands for a field that is not given."""
        if isinstance(values, cls):
            return values
        given = to.mapping("speculative_config", values)
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError(f"speculative_config: unknown field {name!r}{suggest(str(name), names)}")
        return cls(**{name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                if f.default is not None and f.default is not _UNSET:
                    self._set(f.name, f.default)
                elif f.default is _UNSET:
                    self._set(f.name, _UNSET)
            elif value is not f.default:
                self._set(f.name, f.metadata["to"](f"speculative_config.{f.name}", value))
        self._resolve_method()
        self._resolve_head()
        if self.method == "hybrid":
            self._resolve_inner()
        check_fields(self.method, self._given())
        self._resolve_num_tokens()
        self._resolve_lookup()
        check_synthetic(
            self.rejection_sample_method,
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
            self.num_speculative_tokens,
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    # ------------------------------------------------------------------------------ what is asked of a config

    @property
    def rule(self) -> str | None:
        """The acceptance rule chosen for every request of the engine, or None: then each request's own
        default holds (greedy at temperature 0, `coupled` with a seed, `rejection` otherwise)."""
        return self.rejection_sample_method

    @property
    def extracted_layers(self) -> tuple[int, ...]:
        """For method ``extract_hidden_states``: the layers whose input states are written, in their order."""
        return extracted_layers(self.draft_model_config)

    @property
    def acceptance_rates(self) -> tuple[float, ...] | None:
        """Rule ``synthetic``: the chance that draft positions 0..i are accepted, [K] and non-increasing; else None.

        A length L gives sum(rates) = L - 1, certain positions first: L = 2.6, K = 3 -> (1.0, 0.6, 0.0).
        """
        if self.rejection_sample_method != "synthetic":
            return None
        if self.synthetic_acceptance_rates is not None:
            return self.synthetic_acceptance_rates
        assert self.synthetic_acceptance_length is not None
        return rates_of_length(self.synthetic_acceptance_length, self.num_speculative_tokens)

    @property
    def notes(self) -> tuple[str, ...]:
        """Fields that are known but change nothing here, one sentence each."""
        out = []
        if self.enforce_eager and self.method not in CAPTURED_METHODS:
            out.append(
                f"speculative_config.enforce_eager has no effect: nothing of {self.method} is captured in graphs"
            )
        if self.disable_padded_drafter_batch:
            out.append(
                "speculative_config.disable_padded_drafter_batch has no effect: drafter batches are ragged"
            )
        return tuple(out)

    # -------------------------------------------------------------------------------------------- resolution

    def _resolve_method(self) -> None:
        if self.method == "auto":
            if self.model is None:
                raise ConfigError(
                    "speculative_config: needs a method or a model; methods: ngram, suffix, draft_model, eagle, "
                    "eagle3, medusa, mtp"
                )
            self._set("method", detect_method(self.model, self.revision))
        self._set("method", resolve_method(self.method))
        if self.method in MODELLESS_METHODS:
            if self.model is not None and self.model not in (self.method, f"[{self.method}]"):
                raise ConfigError(
                    f"speculative_config.model: {self.model!r} contradicts method {self.method!r}, "
                    "which uses no model"
                )
            self._set("model", None)
        elif self.method == "draft_model" and self.model is None:
            raise ConfigError(
                "speculative_config.model: method 'draft_model' needs a model (folder or hub id)"
            )

    def _resolve_inner(self) -> None:
        """The drafter inside a hybrid one, which ``model`` alone may name, too."""
        name = "speculative_config.hybrid_drafter"
        if self.hybrid_drafter is None and self.model is None:
            raise ConfigError(
                f"{name}: method 'hybrid' needs a model to draft where the look-up finds nothing, such as "
                "{'method': 'draft_model', 'model': ...}"
            )
        if self.hybrid_drafter is None:
            self._set(
                "hybrid_drafter", _inner_drafter(name, {"model": self.model, "revision": self.revision})
            )
        elif self.model is not None:
            raise ConfigError("speculative_config.model: contradicts hybrid_drafter, which names the model")
        self._set("model", None)

    def _given(self) -> dict[str, Any]:
        """The fields that are set, and their values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: v for n, v in values.items() if v is not None and v is not False and v is not _UNSET}

    def _resolve_head(self) -> None:
        """Settings that a head's own config.json brings along."""
        if self.method == "draft_model" and self.model is not None and self._shapes_allow_parallel():
            config = read_config(self.model, self.revision)
            if config is not None and "pard_token" in config:  # PARD: trained to fill in masks
                self._set("parallel_drafting", True)
        if self.method not in HEAD_METHODS:
            return
        if self.model is None:
            if self.method == "mtp":
                return  # the layers are in the target's own checkpoint
            raise ConfigError(
                f"speculative_config.model: method {self.method!r} needs a model, the head's folder or hub id"
            )
        defaults = head_defaults(self.method, self.model, self.revision)
        if defaults.method not in (None, self.method):
            raise ConfigError(
                f"speculative_config.method: {self.method!r} contradicts the config.json of {self.model!r}, which is a "
                f"head for {defaults.method!r}"
            )
        if defaults.parallel:
            self._set("parallel_drafting", True)
        if self.medusa_choices is not None:
            if self.speculative_token_tree is not None:
                raise ConfigError(
                    "speculative_config.medusa_choices: is the same as speculative_token_tree; give one of them"
                )
            self._set("speculative_token_tree", self.medusa_choices)
            self._set("medusa_choices", None)
        elif self._shape_is_open() and defaults.tree is not None:
            self._set("speculative_token_tree", choices("medusa_choices", defaults.tree))
        elif self._shape_is_open() and defaults.num_tokens is not None:
            self._set("num_speculative_tokens", min(defaults.num_tokens, MAX_TREE_NODES))

    @property
    def has_model(self) -> bool:
        """Whether it drafts with weights of its own, or with the target's MTP layers: no look-up."""
        return self.method in ("draft_model", "hybrid", *HEAD_METHODS)

    def _shapes_allow_parallel(self) -> bool:
        """Whether drafting in one pass can do all that the user asks for."""
        return self.speculative_token_tree is None and self.speculative_dynamic_tree is None

    def _shape_is_open(self) -> bool:
        """Whether the user said nothing about how much to draft."""
        return (
            self.num_speculative_tokens is _UNSET
            and self.speculative_token_tree is None
            and self.speculative_dynamic_tree is None
            and self.num_speculative_tokens_per_batch_size is None
        )

    def _resolve_num_tokens(self) -> None:
        table = self.num_speculative_tokens_per_batch_size
        tree = self.speculative_token_tree
        if self.num_speculative_tokens is _UNSET:
            if tree is not None:
                k = len(tree)
            elif self.synthetic_acceptance_rates:
                k = len(self.synthetic_acceptance_rates)
            elif self.speculative_dynamic_tree is not None:
                k = DEFAULT_TREE_NODES
            else:
                k = max(max(row[2] for row in table), 1) if table else _DEFAULT_NUM_TOKENS.get(self.method, 4)
            self._set("num_speculative_tokens", k)
        k = self.num_speculative_tokens
        if tree is not None and k != len(tree):
            raise ConfigError(
                f"speculative_config.num_speculative_tokens: {k} contradicts a speculative_token_tree of "
                f"{len(tree)} nodes"
            )
        if table is not None and max(row[2] for row in table) > k:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens_per_batch_size: its largest K is over "
                f"num_speculative_tokens = {k}"
            )

    def _resolve_lookup(self) -> None:
        if self.method != "ngram" and not (self.method == "hybrid" and self.hybrid_lookup == "ngram"):
            return
        if self.prompt_lookup_max is None and self.prompt_lookup_min is None:
            self._set("prompt_lookup_max", 5)
            self._set("prompt_lookup_min", 2)
        elif self.prompt_lookup_max is None:
            self._set("prompt_lookup_max", self.prompt_lookup_min)
        elif self.prompt_lookup_min is None:
            self._set("prompt_lookup_min", self.prompt_lookup_max)
        assert self.prompt_lookup_min is not None and self.prompt_lookup_max is not None
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min: {self.prompt_lookup_min} is over "
                f"prompt_lookup_max = {self.prompt_lookup_max}"
            )
        check_match_length(self.hybrid_lookup, self.hybrid_min_match, self.prompt_lookup_max)
