"""Names and numbers that all sides share: methods, rules, limits of trees, streams of noise. Imports nothing."""

from typing import Final

KERNELS_VARIABLE: Final = "DRAFTWISE_KERNELS"
"""The environment variable that chooses kernels, see `kernels.select`."""

# ------------------------------------------------------------------------------------------------ methods

PROPOSER: Final = "draftwise.propose.base:Proposer"
"""The base class of every method."""

METHODS: Final = {
    "dflash": "draftwise.propose.heads.block:BlockProposer",
    "draft_model": "draftwise.propose.models.draft_model:DraftModelProposer",
    "eagle": "draftwise.propose.heads.eagle:EagleProposer",
    "eagle3": "draftwise.propose.heads.eagle:Eagle3Proposer",
    "early_exit": "draftwise.propose.models.early_exit:EarlyExitProposer",
    "extract_hidden_states": "draftwise.propose.extract_hidden_states:ExtractHiddenStatesProposer",
    "hybrid": "draftwise.propose.hybrid:HybridProposer",
    "medusa": "draftwise.propose.heads.medusa:MedusaProposer",
    "mtp": "draftwise.propose.heads.mtp:MtpProposer",
    "ngram": "draftwise.propose.lookup.ngram:NgramProposer",
    "suffix": "draftwise.propose.lookup.suffix:SuffixProposer",
    "synthetic": "draftwise.propose.synthetic:SyntheticProposer",
}
"""Methods that are built in, and where their classes are found."""

METHOD_ALIASES: Final = {
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "dflash2": "dflash",
    "domino": "dflash",
    "dspark": "dflash",
    "jetspec": "dflash",
    "draft": "draft_model",
    "draft-model": "draft_model",
    "[suffix]": "suffix",
    "layer_skip": "early_exit",
    "layerskip": "early_exit",
    "self_speculation": "early_exit",
    "deepseek_mtp": "mtp",
    "ernie_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "longcat_flash_mtp": "mtp",
    "mimo_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
"""Spellings that users bring along, and the names they stand for."""

PLANNED_METHODS: Final = ("dflare", "hydra")
"""Methods that are known but not built; a third party may register one of these names."""

RESERVED_METHODS: Final = ("none", "auto", "grammar")
"""Names of methods that the engine uses itself. No other method may have them."""

MODELLESS_METHODS: Final = ("early_exit", "extract_hidden_states", "ngram", "synthetic", "suffix")
LOOK_UP_METHODS: Final = ("ngram", "suffix")
"""Methods that find drafts in texts and draw nothing."""
CHAIN_METHODS: Final = ("extract_hidden_states", "ngram")
"""Methods that draft chains only, and so refuse a `speculative_token_tree`."""
STATIC_METHODS: Final = ("extract_hidden_states", "ngram", "synthetic")
"""Methods that refuse a `speculative_dynamic_tree`."""
CAPTURED_METHODS: Final = ("draft_model", "eagle", "eagle3", "hybrid", "mtp")
"""Methods whose drafters are captured in CUDA graphs, on a device that has them."""
HEAD_METHODS: Final = ("dflash", "eagle", "eagle3", "medusa", "mtp")
"""Methods whose model is a head on the target's hidden states."""
SHIPPED_HEADS: Final = ("eagle3", "medusa", "mtp")
"""The heads that ship with the embedded target."""

_NAMES: Final = ["none"]
_NUMBERS: Final = {"none": 0}


def method_number(name: str) -> int:
    """A number for a method, the same as long as the process lives; 0: "none"."""
    number = _NUMBERS.get(name)
    if number is None:
        number = _NUMBERS[name] = len(_NAMES)
        _NAMES.append(name)
    return number


def method_name(number: int) -> str:
    """The method that has this number."""
    return _NAMES[number]


# ----------------------------------------------------------------------------------------- acceptance rules

RULES: Final = ("rejection", "block", "coupled", "typical", "synthetic")
"""Rules that users choose among; ``greedy`` follows from the temperature."""

RULE_ALIASES: Final = {
    "standard": "rejection",
    "rejection_sampler": "rejection",
    "typical_acceptance_sampler": "typical",
}

TYPICAL_EPSILON: Final = 0.09
TYPICAL_DELTA: Final = 0.3
"""Rule ``typical`` keeps a draft x if p(x) > min(epsilon, delta * exp(-H(p)))."""

# --------------------------------------------------------------------------------------------------- limits

MAX_TREE_NODES: Final = 63
"""Nodes of one proposal that a step verifies: root + 63 nodes fit one 64-bit ancestor mask."""

MAX_FED_NODES: Final = 64
"""Nodes of one tree that a drafter feeds to itself: one bit of an ancestor mask for each (its root is not among them).
More than are verified: it chooses among what it expanded."""

DEFAULT_TREE_NODES: Final = 15
"""Nodes verified of a dynamic tree when ``num_speculative_tokens`` does not say: with the root 16 rows, what a step of
a CPU takes in well. EAGLE-2's 60 are for devices on which 61 rows cost about what one costs."""

# ------------------------------------------------------------------------ streams of noise: sampling/noise.py

SHARED: Final = 0
DRAFT: Final = 1
ACCEPT: Final = 2
RECOVER: Final = 3
