"""`EngineConfig`: the options of an engine, each with its check. `config.resolve` builds one from user input."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from draftwise.config import coerce as to
from draftwise.config.coerce import option
from draftwise.config.events import EventsConfig
from draftwise.config.extraction import METHOD as EXTRACTION
from draftwise.config.extraction import transfer_folder
from draftwise.config.graphs import LARGEST, SIZES, GraphOptions, compilation, graph_options
from draftwise.config.limits import RequestLimits
from draftwise.config.parallel import check_parallel
from draftwise.config.speculative import SpeculativeConfig
from draftwise.errors import ConfigError
from draftwise.quantization.scheme import checked_name

_DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}
_FP8_ALIASES = {"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}  # vLLM's word, torch's word


def _dtype(name: str, value: Any) -> str:
    """A dtype as its name; torch's dtype objects are taken by their name too."""
    text = value if isinstance(value, str) else str(value).removeprefix("torch.")
    return str(to.choice("auto", "float32", "bfloat16", "float16", aliases=_DTYPE_ALIASES)(name, text))


def device_name(name: str, value: Any) -> str:
    """auto, cpu, cuda or cuda:N; torch's device objects are taken by their name too."""
    text = to.string(name, value if isinstance(value, str) else str(value))
    kind, _, index = text.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ConfigError(f"{name}: expected auto, cpu, cuda or cuda:N, got {text!r}")
    return text


def _quantization(name: str, value: Any) -> str:
    """The name of a weight format."""
    return checked_name(to.string(name, value), name)


def _names(name: str, value: Any) -> tuple[str, ...]:
    """One name or several."""
    if isinstance(value, str):
        return (to.string(name, value),)
    return tuple(to.sequence_of(to.string, "a name or a list of names")(name, value))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from. Made by `resolve_engine_config` (`config.resolve`), which fills in what
    depends on the device; each value is checked on construction.

    Raises:
        ConfigError: a value is out of range, two contradict each other, or one asks for what is not supported
            yet.
    """

    model: str | None = option(
        None, to.string, "target model: local folder, GGUF file or hub id; omitted: the embedded model"
    )
    tokenizer: str | None = option(None, to.string, "tokenizer folder or hub id (the model's)")
    revision: str | None = option(None, to.string, "revision of the model on the hub")
    tokenizer_revision: str | None = option(None, to.string, "revision of the tokenizer on the hub")
    dtype: str = option("auto", _dtype, "auto, float32, bfloat16 or float16")
    device: str = option("auto", device_name, "auto, cpu, cuda or cuda:N")
    max_model_len: int | None = option(None, to.size(), "longest prompt + output in tokens (the model's)")
    max_num_seqs: int | None = option(
        None, to.integer(1), "most requests in one step (64 on CPU, 256 on CUDA)"
    )
    max_num_batched_tokens: int = option(2048, to.size(), "most tokens in one step")
    rounds_per_step: int | None = option(
        None,
        to.integer(1, 64),
        "rounds of decoding in a step, at most, if they take 16 ms together, 100 ms where nobody reads before the end "
        "(32 on CPU)",
    )
    block_size: int = option(16, to.integer(1, 1024), "tokens per block of the K/V cache")
    num_kv_blocks: int | None = option(None, to.integer(1, 2**31 - 1), "blocks of the K/V cache")
    kv_cache_memory: int | None = option(None, to.size(), "bytes of the K/V cache, for example 2GiB")
    kv_cache_dtype: str = option(
        "auto",
        to.choice(
            "auto", "float32", "bfloat16", "float16", "int8", "fp8", aliases=_DTYPE_ALIASES | _FP8_ALIASES
        ),
        "type of the K/V cache: float32, bfloat16, float16, int8 or fp8 (auto: the model's)",
    )
    gpu_memory_utilization: float = option(0.9, to.number(0, 1, open_low=True), "share of GPU memory to use")
    enable_prefix_caching: bool = option(True, to.boolean, "share K/V of equal prompt beginnings")
    enable_chunked_prefill: bool = option(True, to.boolean, "compute long prompts in chunks")
    seed: int | None = option(0, to.integer(0, 2**64 - 1), "seed of requests that have none")
    speculation_control: str = option(
        "adaptive",
        to.choice("adaptive", "static"),
        "adaptive: draft only where it pays; static: what each request asks for",
    )
    enforce_eager: bool = option(False, to.boolean, "do not capture graphs")
    async_scheduling: bool | None = option(
        None, to.boolean, "plan each step while the one before it runs (on CUDA unless given)"
    )
    tensor_parallel_size: int = option(1, to.integer(1, 64), "processes that share the model, each a part")
    data_parallel_size: int = option(
        1, to.integer(1, 64), "engines behind one port, each with the whole model (draftwise serve)"
    )
    data_parallel_rank: int = option(
        0, to.integer(0), "number of this engine in cache events, if you run several yourself"
    )
    pipeline_parallel_size: int = option(1, to.integer(1), "stages of the model; 1")
    distributed_executor_backend: str | None = option(
        None, to.choice("uni", "mp", "ray", "external_launcher"), "where the workers run"
    )
    worker_timeout: float = option(
        300.0, to.number(0, 1e6, open_low=True), "seconds that a step of several processes may take"
    )
    enable_expert_parallel: bool = option(False, to.boolean, "spread experts over ranks")
    quantization: str | None = option(
        None,
        _quantization,
        "weights in int8, int4 or, on CUDA, fp8 (as the checkpoint has them); activations are rounded, too, but for "
        "int8_weight_only and int4_weight_only",
    )
    batch_invariant: bool = option(
        False,
        to.boolean,
        "on CUDA: products whose bits do not depend on the batch (native CPU kernels have no others)",
    )
    quantization_cache: str | None = option(
        None, to.string, "folder that keeps rounded weights for the next start, or auto (they are not kept)"
    )
    enable_lora: bool = option(False, to.boolean, "take LoRA adapters (lora_request)")
    max_loras: int = option(8, to.integer(1), "most adapters of one step (8)")
    max_cpu_loras: int | None = option(
        None, to.integer(1), "most adapters kept in memory for later requests (as many as max_loras)"
    )
    max_lora_rank: int = option(16, to.integer(1), "largest rank of an adapter (16)")
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None, SIZES, "row counts captured in CUDA graphs"
    )
    max_cudagraph_capture_size: int | None = option(
        None, LARGEST, "most rows captured in CUDA graphs (512 for passes without attention)"
    )
    compilation_config: Any = option(
        None,
        compilation,
        "settings of a compiler, as JSON; of these, cudagraph_mode and sizes have an effect",
    )
    kv_transfer_config: dict[str, Any] | None = option(
        None, to.mapping, "connector for K/V or hidden states, as JSON"
    )
    kv_events_config: EventsConfig = option(
        EventsConfig(),
        EventsConfig.from_value,
        'publish changes of cached blocks, as JSON: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
    )
    served_model_name: tuple[str, ...] | None = option(
        None, _names, "name of the model in the server's answers"
    )
    trust_remote_code: bool = option(False, to.boolean, "run code that comes with a checkpoint")
    skip_tokenizer_init: bool = option(False, to.boolean, "token ids in and out, no tokenizer")
    disable_log_stats: bool = option(False, to.boolean, "do not log statistics")
    num_threads: int | None = option(None, to.integer(1, 4096), "threads of the CPU kernels")
    request_limits: RequestLimits = option(
        RequestLimits(),
        RequestLimits.from_value,
        'limits of a request, as JSON: {"max_stop_strings": 64, "max_choices": "10k", ...}',
    )
    speculative: tuple[SpeculativeConfig, ...] = ()
    embedded: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "to" not in f.metadata or value is f.default:
                continue
            value = f.default if value is None else f.metadata["to"](f.name, value)
            object.__setattr__(self, f.name, value)
        self._refuse_unsupported()
        self._refuse_contradictions()

    @property
    def default_method(self) -> str:
        """The method of requests that choose none; "none": plain decoding."""
        return self.speculative[0].method if self.speculative else "none"

    @property
    def has_ranks(self) -> bool:
        """Whether the model runs in other processes than the engine's own."""
        return self.tensor_parallel_size > 1 or self.distributed_executor_backend == "ray"

    @property
    def graphs(self) -> GraphOptions:
        """The settings for CUDA graphs, if any are captured."""
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        return graph_options(self.compilation_config, sizes, largest)

    @property
    def drafters(self) -> tuple[SpeculativeConfig, ...]:
        """Every drafter that a request may name: the configured ones, and n-gram and suffix look-up, which cost
        nothing until a request uses them."""
        given = {spec.method for spec in self.speculative}
        more = [SpeculativeConfig(method=name) for name in ("ngram", "suffix") if name not in given]
        return (*self.speculative, *more)

    def _refuse_unsupported(self) -> None:
        check_parallel(self, self.has_ranks)
        if self.quantization_cache is not None and self.quantization == "fp8":
            raise ConfigError("quantization_cache: keeps weights in int8 and int4, not in fp8; leave it out")
        if self.quantization_cache is not None and self.quantization is None:
            raise ConfigError("quantization_cache: keeps weights that quantization= rounds; give that, too")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras: {self.max_cpu_loras} is under max_loras = {self.max_loras}")
        transfer_folder(self.kv_transfer_config)

    def _refuse_contradictions(self) -> None:
        _ = self.graphs  # says what contradicts what
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_kv_blocks and kv_cache_memory contradict each other: give one of them")
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is under "
                f"max_num_seqs = {self.max_num_seqs}; a step needs a token per request"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError("tokenizer and skip_tokenizer_init contradict each other: give one of them")
        methods = [spec.method for spec in self.speculative]
        if self.speculative and self.kv_transfer_config is not None and EXTRACTION not in methods:
            raise ConfigError(f"kv_transfer_config: only for method {EXTRACTION!r} of a speculative_config")
        for method in methods:
            if methods.count(method) > 1:
                raise ConfigError(
                    f"speculative_config: method {method!r} is listed twice; requests choose a drafter by its method"
                )


ENGINE_OPTIONS: tuple[str, ...] = tuple(f.name for f in fields(EngineConfig) if "to" in f.metadata)
"""The names a user may give, without the speculative ones."""
