"""Messages whose content is a list: texts are joined by line ends, an image is an error."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from draftwise.config.limits import RequestLimits
from draftwise.engine.chats import chat_prompt
from draftwise.errors import RequestError


class Tokenizer:
    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return "|".join(message["content"] for message in messages)

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())


class Templates(Tokenizer):
    """Renders the template that it has."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(self.chat_template).render()


def render(
    content: list[Any], tokenizer: Tokenizer | None = None, tools: Any = None, options: Any = None
) -> dict[str, Any]:
    return chat_prompt(
        tokenizer or Tokenizer(), [{"role": "user", "content": content}], limits=RequestLimits(), max_model_len=100,
        chat_template=None, add_generation_prompt=True, tools=tools,
        template_options=options,
    )  # fmt: skip


def test_text_is_rendered() -> None:
    parts = [{"type": "text", "text": "what is"}, "this"]
    assert render(parts)["prompt"] == "what is\nthis"


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division by zero"), KeyError("x"), RecursionError("deep")]
)
def test_an_error_in_a_template_is_the_requests(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(Tokenizer, "apply_chat_template", fail)
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: "):
        render(["this"])


@pytest.mark.parametrize("tools", [5, "f", {"type": "function"}])
def test_tools_are_a_list(tools: Any) -> None:
    with pytest.raises(RequestError, match=r"^tools is .*; it must be a list"):
        render(["this"], tools=tools)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (5, "chat_template_kwargs is 5; it must be a mapping"),
        ({"add_generation_prompt": False}, "'add_generation_prompt' cannot be set"),
        ({"tokenize": True}, "'tokenize' cannot be set"),
    ],
)
def test_options_of_the_template_are_its_variables(options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(["this"], options=options)
    assert render(["this"], options={"enable_thinking": False})["prompt"] == "this"


def test_the_messages_that_were_given_stay_as_they_are() -> None:
    parts: list[Any] = [{"type": "text", "text": "a"}]
    render(parts)
    assert parts == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 3}, 3, None])
def test_a_part_without_text_is_an_error(part: Any) -> None:
    with pytest.raises(RequestError, match="part of content"):
        render([part])


@pytest.mark.parametrize("part", [
    {"type": "image", "image": "cat.png"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"},
    {"type": "video", "text": "not this"}, {"type": 3},
])  # fmt: skip
def test_what_is_not_text_is_an_error(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"content of type {part['type']!r} is not supported, only text"):
        render([{"type": "text", "text": "what is this?"}, part])


def test_a_broken_template_is_not_the_messages_fault() -> None:
    with pytest.raises(
        RequestError, match=r"the chat template is not valid Jinja \(line 2\): unexpected end"
    ):
        render(["x"], Templates("{# a comment #}\n{{ broken"))
    with pytest.raises(RequestError, match="the chat template refused the messages: 'x' is undefined"):
        render(["x"], Templates("{{ x }}"))


@pytest.mark.parametrize(
    "template, role",
    [("{% if m.role == 'system' %}", "system"), ("{% if m.role == 'developer' %}", "developer")],
)
def test_a_developer_speaks_under_the_name_that_the_template_knows(template: str, role: str) -> None:
    """Templates leave out messages of roles that they do not know."""

    class Roles(Tokenizer):
        chat_template = template

        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
            return "|".join(message["role"] for message in messages)

    def roles(tokenizer: Tokenizer, **options: Any) -> Any:
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
        return chat_prompt(
            tokenizer, messages, limits=RequestLimits(), max_model_len=100, add_generation_prompt=True, tools=None,
            **{"chat_template": None, **options},
        )["prompt"]  # fmt: skip

    assert roles(Roles()) == f"{role}|user"
    assert roles(Roles(), chat_template="of the request") == "system|user"
