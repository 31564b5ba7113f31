"""Conversations to prompts, through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.config import RequestLimits
from draftwise.encoding import encode_text
from draftwise.engine.limits import check_messages, check_prompt
from draftwise.errors import RequestError, shown

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_OWN_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"}
)
"""Arguments of the rendering, which are no variables of the template."""


def _flat(content: object) -> object:
    """Content as templates expect it: a list of text parts becomes their texts, a line each; anything else stays.

    Raises RequestError for a part that is no text, because the model would not see the image that a template
    mentions.

    >>> _flat([{"type": "text", "text": "what is"}, "this"])
    'what is\\nthis'
    """
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RequestError(f"messages: a part of content is a text or a mapping, got {shown(part)}")
        kind = part.get("type", "text")
        if kind not in _TEXT_PARTS:
            raise RequestError(f"messages: content of type {shown(kind)} is not supported, only text")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise RequestError("messages: a part of content of type text needs text")
        texts.append(text)
    return "\n".join(texts)


def _roles_of(template: object, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages of role "developer", OpenAI's newer name of "system", under the name that the template knows: others
    than it knows, many templates leave out without a word."""
    if all(m["role"] != "developer" for m in messages) or "developer" in str(template):
        return messages
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    limits: RequestLimits,
    max_model_len: int,
    chat_template: str | None,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    template_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Messages -> ``{"prompt": text, "prompt_token_ids": ids}`` through a chat template. Raises RequestError; its
    `LimitError` before the template is rendered, or before the text is tokenized.

    ``template_options``: further variables of the template, such as ``enable_thinking``.
    """
    if not messages:
        raise RequestError("a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise RequestError(f"a message is a mapping with 'role' and 'content', got {shown(message)}")
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
        raise RequestError(f"tools is {shown(tools)}; it must be a list of mappings")
    if template_options is not None:
        if not isinstance(template_options, Mapping):
            raise RequestError(f"chat_template_kwargs is {shown(template_options)}; it must be a mapping")
        for name in _OWN_ARGUMENTS.intersection(template_options):
            raise RequestError(
                f"chat_template_kwargs: {name!r} cannot be set: it is no variable of the template"
            )
    check_messages(limits, messages, tools, max_model_len)
    messages = [
        {**m, "content": _flat(m["content"])} if isinstance(m.get("content"), list) else dict(m)
        for m in messages
    ]
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "this model has no chat template (it is a base model): use generate with a plain prompt (over HTTP "
            "/v1/completions), or give one: chat_template, or draftwise serve --chat-template FILE"
        )
    messages = _roles_of(chat_template or tokenizer.chat_template, messages)
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=None if tools is None else [dict(t) for t in tools],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(template_options or {}),
        )
    except jinja2.TemplateSyntaxError as error:  # whatever the messages are
        raise RequestError(f"the chat template is not valid Jinja (line {error.lineno}): {error}") from None
    except Exception as error:  # a template is a program: it may divide by zero
        raise RequestError(f"the chat template refused the messages: {error}") from None
    check_prompt(limits, text, max_model_len, "messages")
    ids = encode_text(tokenizer, text, "messages", False)  # the template wrote the special tokens itself
    return {"prompt": text, "prompt_token_ids": ids}
