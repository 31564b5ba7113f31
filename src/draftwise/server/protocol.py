"""Bodies of requests: OpenAI's fields, vLLM's, and those of this engine.

Three kinds of fields: those that do something; those of other servers which have no meaning here and are taken without
effect, or mean one of ours (`fields`, listed in the guide); and unknown ones.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictBool, StrictFloat, StrictInt, StrictStr

# Lists report their first fault and no other: one of a million would make a million reports.
Texts = Annotated[list[StrictStr], Field(fail_fast=True)]
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Number = StrictInt | StrictFloat
Object = dict[str, Any]


class Body(BaseModel):
    """Base of all bodies: strict types, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    REFUSED: ClassVar[tuple[str, ...]] = ()  # what OpenAI has and this server has not
    model: StrictStr | None = None
    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """The body's size in bytes, an estimate of the work."""
        return self._size


class GeneratingBody(Body):
    """The fields that all generating requests share."""

    stream: StrictBool | None = None
    priority: StrictInt | None = Field(None, description="lower values first")
    timeout: Number | None = Field(None, description="deadline in seconds")
    return_metrics: StrictBool | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # vLLM's: usage so far in every chunk
    include_obfuscation: bool | None = False  # OpenAI's padding against traffic analysis: not done here


class ResponsesStreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_obfuscation: bool | None = False  # as above


class SamplingBody(GeneratingBody):
    """Fields that become `SamplingParams`; None stands for "not given". Ranges are checked there."""

    n: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    stop: StrictStr | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    prompt_logprobs: StrictInt | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    structured_outputs: Object | None = None
    response_format: Object | None = None
    speculation: Object | None = Field(
        None,
        description="of this request: method, num_speculative_tokens, speculative_token_tree, "
        "speculative_dynamic_tree, rule",
    )
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: StrictInt | None = Field(
        None,
        description="keep only so many tokens of the end of the prompt; -1: as many as there is room for",
    )
    cache_salt: StrictStr | None = Field(
        None,
        description="needs --enable-prefix-caching false: prefixes are shared by all requests or by none",
    )
    return_tokens_as_token_ids: StrictBool | None = Field(
        None, description="tokens of logprobs as token_id:ID instead of their text"
    )
    request_id: StrictStr | None = Field(None, max_length=256)
    return_token_ids: StrictBool | None = None
    return_trace: StrictBool | None = Field(None, description="the draft tree of every step")
    return_token_sources: StrictBool | None = Field(
        None, description="of every token: who drafted it and at which position, or why nobody did"
    )

    @property
    def keep_trace(self) -> bool:
        """Whether the engine must record the steps."""
        return bool(self.return_trace or self.return_token_sources)


SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids",
    "bad_words", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "structured_outputs", "speculation",
)  # fmt: skip
"""Fields of `SamplingBody` that go to `SamplingParams` as they are."""


class CompletionBody(SamplingBody):
    prompt: StrictStr | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: StrictInt | None = 16
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None
    add_special_tokens: StrictBool = True


class ChatBody(SamplingBody):
    messages: Objects
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    reasoning_effort: StrictStr | None = None
    thinking_token_budget: StrictInt | None = Field(
        None, ge=0, description="most tokens of reasoning; then the closing mark follows"
    )
    include_reasoning: StrictBool = Field(True, description="false: reasoning is left out of the answer")
    documents: Objects | None = Field(None, description="a variable of the chat template")
    add_special_tokens: StrictBool = Field(False, description="in front of what the chat template wrote")
    echo: StrictBool = Field(
        False, description="answers begin with the last message if that is the assistant's"
    )
    modalities: Texts | None = None
    REFUSED: ClassVar[tuple[str, ...]] = (
        "audio", "functions", "function_call", "moderation", "web_search_options",
    )  # fmt: skip


class ResponsesBody(GeneratingBody):
    """Text and function calls of OpenAI's Responses API. Nothing is stored."""

    input: StrictStr | Objects
    instructions: StrictStr | None = None
    max_output_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    text: Object | None = None
    reasoning: Object | None = Field(None, description="effort is a variable of the chat template")
    include: Texts | None = Field(None, description="nothing that there is here may be asked for")
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[StrictStr, StrictStr] | None = Field(None, description="comes back with the answer")
    previous_response_id: StrictStr | None = Field(None, description="refused: nothing is stored")
    seed: StrictInt | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    speculation: Object | None = None
    stream_options: ResponsesStreamOptions | None = None
    REFUSED: ClassVar[tuple[str, ...]] = (
        "access_programs", "background", "background_options", "context_management", "conversation", "image",
        "max_tool_calls", "moderation", "prompt", "top_logprobs",
    )  # fmt: skip


class CountTokensBody(Body):
    """The fields of a prompt of Anthropic's Messages API."""

    messages: Objects
    system: StrictStr | Objects | None = None
    tools: Objects | None = None
    tool_choice: Object | None = None
    thinking: Object | None = Field(
        None,
        description="enabled or disabled: the variable enable_thinking of the chat template; budget_tokens: most "
        "tokens of thinking",
    )
    output_config: Object | None = Field(None, description="format: a JSON schema; effort: for the template")
    chat_template_kwargs: Object | None = None
    REFUSED: ClassVar[tuple[str, ...]] = ("container", "mcp_servers", "context_management")


class MessagesBody(CountTokensBody, GeneratingBody):
    """Text and functions of Anthropic's Messages API."""

    max_tokens: StrictInt
    stop_sequences: Texts | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    speculation: Object | None = None


class TokenizeBody(Body):
    prompt: StrictStr | None = None
    messages: Objects | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    return_token_strs: StrictBool | None = None
    tools: Objects | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: Object | None = None


class LoadAdapterBody(Body):
    lora_name: StrictStr = Field(description="the model's name in requests that want it")
    lora_path: StrictStr = Field(description="folder on the server, or hub id")
    load_inplace: StrictBool | None = None


class UnloadAdapterBody(Body):
    lora_name: StrictStr
    lora_int_id: StrictInt | None = Field(None, description="accepted; the name says which")


class DetokenizeBody(Body):
    tokens: TokenIds


class ScaleBody(Body):
    """POST /scale_elastic_ep"""

    new_data_parallel_size: StrictInt
