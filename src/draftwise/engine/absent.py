"""Methods of vLLM's engines that this engine does not support. The names exist and raise an error that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from draftwise.errors import RequestError

_NO_VECTORS = (
    "Draftwise generates text and makes no vectors or scores of it; use a library for embedding models"
)
_NO_SLEEP = (
    "an engine keeps its memory while it is open; close() gives it back, and a new engine takes it again"
)
_NO_RPC = "the model is not reached from outside; llm.stats(), llm.guarantees and llm.config say how it runs"
_NO_PROFILE = "no profiler is built in; llm.stats() has the times of steps, draftwise profile measures them"
_NO_PAUSE = "an engine has no pause; hold new requests back, and end running ones with abort(request_id)"
_NO_UPDATE = "weights do not change while an engine runs; close() it and build a new one"
_NO_QUEUE = "give all prompts to generate at once, or have AsyncLLM, which takes requests at any time"

_REASONS = {
    "embed": _NO_VECTORS,
    "encode": f"{_NO_VECTORS}. To turn text into token ids, use llm.get_tokenizer().encode(text)",
    "classify": _NO_VECTORS,
    "score": _NO_VECTORS,
    "reward": _NO_VECTORS,
    "beam_search": "not supported; draw samples with SamplingParams(n=4, logprobs=0) and compare their "
    "cumulative_logprob with logprobs=0",
    "sleep": _NO_SLEEP,
    "wake_up": _NO_SLEEP,
    "is_sleeping": _NO_SLEEP,
    "release_kv_cache_memory": _NO_SLEEP,
    "collective_rpc": _NO_RPC,
    "apply_model": _NO_RPC,
    "start_profile": _NO_PROFILE,
    "stop_profile": _NO_PROFILE,
    "pause_generation": _NO_PAUSE,
    "resume_generation": _NO_PAUSE,
    "is_paused": _NO_PAUSE,
    "init_weight_transfer_engine": _NO_UPDATE,
    "start_weight_update": _NO_UPDATE,
    "update_weights": _NO_UPDATE,
    "finish_weight_update": _NO_UPDATE,
    "scale_elastic_ep": "a program has one engine; the replicas of draftwise serve are scaled by POST "
    "/scale_elastic_ep",
    "do_log_stats": "an engine in a program writes no line of statistics; llm.stats() has the numbers",
    "pin_lora": "adapters move in and out as requests need them; max_loras says how many have a place at once",
    "reset_mm_cache": "prompts are texts: there is no cache of images",
    "reset_encoder_cache": "prompts are texts: there is no cache of images",
    "enqueue": _NO_QUEUE,
    "enqueue_chat": _NO_QUEUE,
    "wait_for_completion": _NO_QUEUE,
}

_ATTRIBUTES = {
    "llm_engine": "LLM is no shell around an LLMEngine; its own methods are stats(), get_tokenizer(), config, ...",
    "engine_core": "its own methods are stats(), abort(request_id), config, ...",
    "model_config": "see config and max_model_len",
    "vllm_config": "see config",
}


class Absent:
    """Methods that raise `RequestError` with what to do instead: embed, beam_search, sleep, collective_rpc, ..."""

    if not TYPE_CHECKING:  # a checker is to go on finding names that are wrong

        def __getattr__(self, name: str) -> Any:
            """For a name that nobody has. Not a `RequestError`: ``hasattr`` is to say no."""
            hint = f"; {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
            )


def _refusing(name: str, reason: str) -> Any:
    def method(self: Absent, *arguments: Any, **options: Any) -> NoReturn:
        raise RequestError(f"{name}: {reason}")

    method.__name__, method.__qualname__ = name, f"Absent.{name}"
    method.__doc__ = "Not there: raises RequestError."
    return method


for _name, _reason in _REASONS.items():
    setattr(Absent, _name, _refusing(_name, _reason))
