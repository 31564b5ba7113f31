"""Messages whose content is a list: text is rendered, an image is an error and no place that nothing fills."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise.config.limits import RequestLimits
from draftwise.engine.llm import chat_prompt
from draftwise.errors import RequestError


class Tokenizer:
    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return " ".join(part["text"] for message in messages for part in message["content"])

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())


def render(content: list[Any]) -> dict[str, Any]:
    return chat_prompt(
        Tokenizer(), [{"role": "user", "content": content}], limits=RequestLimits(), max_model_len=100,
        chat_template=None, add_generation_prompt=True, tools=None,
    )  # fmt: skip


def test_text_is_rendered() -> None:
    assert (
        render([{"type": "text", "text": "what is"}, {"type": "text", "text": "this"}])["prompt"]
        == "what is this"
    )


@pytest.mark.parametrize("part", [
    {"type": "image", "image": "cat.png"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"},
    {"type": "video", "text": "not this"}, {"type": 3},
])  # fmt: skip
def test_what_is_not_text_is_an_error(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"content of type {part['type']!r} is not supported, only text"):
        render([{"type": "text", "text": "what is this?"}, part])
