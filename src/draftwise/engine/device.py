"""The side of an engine that computes: models, drafters, caches and the executor, built from a configuration.

In an engine of one process this stands beside the scheduler; where several ranks share a model, each has one in a
process of its own (`engine.worker`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftwise.collector import collector_paused
from draftwise.config import EngineConfig
from draftwise.config.extraction import transfer_folder
from draftwise.cpus import default_threads
from draftwise.engine.cache_size import (
    bytes_of_block,
    cache_blocks,
    cache_memory,
    kv_dtype,
    state_memory,
    step_widths,
)
from draftwise.engine.facts import DeviceFacts, Traits
from draftwise.engine.states import check_drafters, plan_states
from draftwise.engine.surroundings import torch_threads
from draftwise.engine.tokenizing import end_tokens
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.setup import GraphSetup, backend_for, capturable
from draftwise.graphs.timing import pass_times
from draftwise.kernels.ranks import Ranks
from draftwise.kernels.select import native_reason
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.lending import WholeTables
from draftwise.models.loader import load_model
from draftwise.models.lora.decoder import AdaptedDecoder
from draftwise.models.tokenizer import load_tokenizer
from draftwise.propose.base import Proposer, ProposerContext
from draftwise.propose.contained import ContainedProposer
from draftwise.propose.registry import resolve_proposer
from draftwise.propose.shared import FollowingProposer, LeadingProposer
from draftwise.runner.local import LocalExecutor
from draftwise.runner.proposal_checks import is_foreign
from draftwise.runner.step_checks import settle_steps
from draftwise.structured.grammars import Grammars
from draftwise.verify.rates import SyntheticAcceptance
from draftwise.verify.select import default_rules

logger = logging.getLogger("draftwise")

_FLOAT32_LIMIT = 1 << 30
"""Models under this many bytes in float32 run in float32 on a CPU when dtype is "auto"."""


@dataclass(frozen=True, slots=True)
class Device:
    """The computing side, in this process."""

    model: DecoderModel
    executor: LocalExecutor
    tokenizer: Any
    grammars: Grammars
    facts: DeviceFacts


def load_engine_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer that a configuration names; None: it skips the tokenizer."""
    if config.skip_tokenizer_init:
        return None
    assert config.model is not None
    return load_tokenizer(
        config.tokenizer or config.model,
        revision=config.tokenizer_revision or config.revision,
        trust_remote_code=config.trust_remote_code,
    )


def make_grammars(config: EngineConfig, facts: DeviceFacts, tokenizer: Any) -> Grammars:
    """Grammars of a model's vocabulary."""
    return Grammars(
        tokenizer,
        facts.model.vocab_size,
        end_tokens(facts.model, tokenizer),
        config.request_limits.max_grammar_seconds,
    )


@collector_paused()
def build_device(
    config: EngineConfig, clock: Callable[[], float] = time.perf_counter, ranks: Ranks | None = None
) -> Device:
    """Load models, drafters and caches, and build the executor.

    Args:
        ranks: the processes that share the model; this process loads its part. None: it is not shared.

    Raises ConfigError or ModelLoadError.
    """
    threads = default_threads(torch.get_num_threads())
    if ranks is not None and ranks.part.size > 1:
        threads = max(1, threads // ranks.part.size)
    threads = config.num_threads or threads
    with torch_threads(threads):
        return _build_device(config, clock, ranks, threads)


def _build_device(
    config: EngineConfig, clock: Callable[[], float], ranks: Ranks | None, threads: int
) -> Device:
    assert config.model is not None, "resolve_engine_config names the embedded model"
    device = torch.device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    model = load_model(
        config.model,
        dtype=dtype or _auto_dtype(config, device),
        device=device,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        quantization_cache=_quantization_cache(config),
        batch_invariant=config.batch_invariant,
        adapters=config.enable_lora,
        ranks=ranks,
        experts_by_rank=config.enable_expert_parallel,
    )
    settle_steps(device, model.config.vocab_size, config.block_size, ranks)
    if config.enable_lora:
        model = AdaptedDecoder(model)
    max_model_len = model.config.max_model_len
    graphs = _graphs(config, model, device)
    if graphs is not None:
        if isinstance(model, AdaptedDecoder) and not model.stack(config.max_loras, config.max_lora_rank):
            logger.info("steps of requests with adapters are not captured as graphs")
        model = graphs.target(model, step_widths(config))
    tokenizer = load_engine_tokenizer(config)
    states = plan_states(config, model, config.max_num_seqs or 64, state_memory(config, device))
    num_seqs = (config.max_num_seqs or 64) if states is None else states.slots
    proposers = _load_proposers(config, model, tokenizer, max_model_len, device, graphs, num_seqs, ranks)
    if graphs is not None:
        logger.info("graphs to be captured: %s", graphs)
    check_drafters({d.method: d for d in config.drafters}, proposers)
    num_blocks, cache_bytes = cache_blocks(
        config, model, list(proposers.values()), max_model_len, device, graphs, states
    )
    if ranks is not None:  # what the tightest can hold
        fewer = ranks.least(num_blocks)
        cache_bytes -= (num_blocks - fewer) * bytes_of_block(config, model, list(proposers.values()))
        num_blocks = fewer
    capacity = num_blocks * config.block_size
    if capacity < max_model_len:
        if config.max_model_len is not None:
            logger.warning(
                "the KV cache has room for %d tokens, max_model_len is %d: longer requests are refused",
                capacity,
                max_model_len,
            )
        else:
            max_model_len = capacity
    scratch = max((p.target_scratch_blocks() for p in proposers.values()), default=0)
    cache_dtype = kv_dtype(config, model)
    with cache_memory(num_blocks, cache_bytes):
        storage = KVStorage(
            model.kv_layout(), num_blocks + scratch, config.block_size, cache_dtype, device, spare=model.pads,
            states=None if states is None else states.store(device),
        )  # fmt: skip
        for proposer in proposers.values():
            proposer.allocate(num_blocks)
    for proposer in proposers.values():
        proposer.use_target_storage(storage)
    model.prepare(storage, sorted({i for p in proposers.values() for i in p.capture_layers}))

    facts = DeviceFacts(
        model=model.config,
        drafters={name: Traits.of(p) for name, p in proposers.items()},
        max_model_len=max_model_len,
        num_seqs=num_seqs,
        num_blocks=num_blocks,
        cache_bytes=cache_bytes,
        weight_bytes=model.weight_bytes(),
        same_bits=model.same_bits,
        most_drafts=None if states is None else states.drafts,
    )
    grammars = make_grammars(config, facts, tokenizer)
    executor = LocalExecutor(
        model,
        storage,
        proposers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        device=device,
        synthetic=_synthetic(config),
        rules=default_rules(device),
        grammars=grammars,
        seated=bool(config.async_scheduling),
        clock=clock,
        threads=threads,
    )
    if executor.seats is not None and isinstance(model, GraphedDecoder):
        learned = config.speculation_control == "adaptive"
        facts = replace(facts, pass_times=pass_times(model, storage, num_blocks, clock) if learned else ())
    return Device(model, executor, tokenizer, grammars, facts)


def _auto_dtype(config: EngineConfig, device: torch.device) -> torch.dtype | None:
    """None: the checkpoint's own. On a CPU without native kernels a small model runs in float32: torch's bfloat16
    products are slower there for few rows, and their rounding depends on the number of rows, so that greedy text would,
    rarely, differ with and without speculation. float16, which the native kernels lack, becomes float32 likewise."""
    if device.type != "cpu":
        return None
    from draftwise.models.loader import checkpoint_num_parameters, is_quantized_checkpoint, load_config

    assert config.model is not None
    if config.quantization is not None or is_quantized_checkpoint(config.model, config.revision):
        return torch.bfloat16
    own = load_config(config.model, config.revision).dtype
    if own is not None and own != "auto":
        stored = getattr(torch, own, None)
        if not isinstance(stored, torch.dtype) or not stored.is_floating_point:
            raise ModelLoadError(
                f"{config.model}: config.json names dtype {own!r}, which is no type of weights"
            )
        if native_reason(stored, device) is None:
            return None
    return torch.float32 if checkpoint_num_parameters(config.model) * 4 <= _FLOAT32_LIMIT else None


def _load_proposers(
    config: EngineConfig,
    model: DecoderModel,
    tokenizer: Any,
    max_model_len: int,
    device: torch.device,
    graphs: GraphSetup | None,
    num_seqs: int,
    ranks: Ranks | None,
) -> dict[str, Proposer]:
    proposers: dict[str, Proposer] = {}
    for spec in config.drafters:
        context = ProposerContext(
            speculative=spec,
            target_config=model.config,
            target_model=model,
            block_size=config.block_size,
            dtype=model.dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=num_seqs,
            vocab_size=model.config.vocab_size,
            tokenizer=tokenizer,
            transfer_folder=transfer_folder(config.kv_transfer_config),
            target_path=config.model,
            target_revision=config.revision,
            graphs=None if spec.enforce_eager else graphs,
            ranks=ranks,
        )
        proposer = resolve_proposer(spec.method)
        if spec.speculative_dynamic_tree is not None and not proposer.drafts_dynamic_trees:
            raise ConfigError(
                f"speculative_config.speculative_dynamic_tree: method {spec.method!r} drafts no dynamic trees"
            )
        if ranks is None or spec.draft_tensor_parallel_size != 1 or not spec.has_model:
            proposers[spec.method] = _made(proposer, context)
        elif ranks.part.rank > 0:
            proposers[spec.method] = FollowingProposer(proposer, ranks)
        else:
            assert config.model is not None
            whole = WholeTables(model, config.model, config.revision, config.quantization)
            alone = replace(context, ranks=None, target_model=whole)
            proposers[spec.method] = LeadingProposer(_made(proposer, alone, in_rank=True), ranks)
    return proposers


def _made(proposer: type[Proposer], context: ProposerContext, *, in_rank: bool = False) -> Proposer:
    """A drafter. ``in_rank``: it is alone in a rank's process, which the context does not tell."""
    made = proposer.create(context)
    if not is_foreign(made):
        return made
    return ContainedProposer(made, always=in_rank or context.ranks is not None)


def _graphs(config: EngineConfig, model: DecoderModel, device: torch.device) -> GraphSetup | None:
    """The graphs to capture; None: none. Kernels that cannot be captured run as they are."""
    options = config.graphs
    if config.enforce_eager or options.mode == "none":
        return None
    backend = backend_for(device)
    if backend is None or not capturable(model):
        return None
    return GraphSetup(
        backend,
        config.block_size,
        config.max_num_seqs or 64,
        config.max_num_batched_tokens,
        model.config.max_model_len,
        options.sizes,
        options.largest,
        options.mode,
    )


def _quantization_cache(config: EngineConfig) -> Path | None:
    if config.quantization_cache is None:
        return None
    if config.quantization_cache == "auto":
        from draftwise.models.rounded import default_cache

        return default_cache()
    return Path(config.quantization_cache).expanduser()


def _synthetic(config: EngineConfig) -> SyntheticAcceptance | None:
    for spec in config.drafters:
        if spec.acceptance_rates is not None:
            return SyntheticAcceptance(spec.acceptance_rates)
    return None
