"""Runs the clients that people have against a server, each in a process of its own, and prints a table.

    python -m venv /tmp/clients && /tmp/clients/bin/pip install openai anthropic litellm langchain-openai llm \
        instructor pydantic-ai-slim[openai] openai-agents llama-index-llms-openai-like dspy \
        smolagents[openai] haystack-ai requests
    python benchmarks/clients.py --python /tmp/clients/bin/python

The server is `draftwise serve` with the embedded model and its defaults. A client that is not installed is named as
absent; a client whose program raises or whose answer is not what it should be has failed, and the exit code is 1.
The embedded model writes Python code and follows no instructions, so that programs look at the shape of answers (and,
where a schema or a tool is demanded, at what the grammar guarantees), not at their sense.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"

PROGRAMS: dict[str, tuple[str, str]] = {
    "openai": (
        "openai",
        """
import openai
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
assert MODEL in [m.id for m in client.models.list()]
said = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "def add("}], max_tokens=16)
assert said.choices[0].message.content and said.usage.completion_tokens
pieces = list(client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "def add("}],
    max_tokens=16, stream=True, stream_options={"include_usage": True}))
assert pieces[-1].usage.completion_tokens and any(p.choices and p.choices[0].delta.content for p in pieces)
called = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "weather"}], max_tokens=200,
    tools=[TOOL], tool_choice="required")
assert called.choices[0].finish_reason == "tool_calls"
assert called.choices[0].message.tool_calls[0].function.name == "weather"
text = client.completions.create(model=MODEL, prompt="def f(", max_tokens=8, logprobs=2, seed=1)
assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
answer = client.responses.create(model=MODEL, input="def f(", max_output_tokens=16)
assert answer.output_text
kinds = [e.type for e in client.responses.create(model=MODEL, input="def f(", max_output_tokens=16, stream=True)]
assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
try:
    client.completions.create(model=MODEL, prompt="word " * 50_000, max_tokens=1)
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded", error
else:
    raise AssertionError("too long a prompt was taken")
try:
    client.embeddings.create(model=MODEL, input="x")
except openai.APIStatusError as error:
    assert error.status_code in (400, 404, 501), error
""",
    ),
    "openai (parse)": (
        "openai",
        """
import openai, pydantic
class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    size: int = pydantic.Field(ge=0, le=99)
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
parsed = client.chat.completions.parse(model=MODEL, messages=[{"role": "user", "content": "a city"}],
    response_format=City, max_tokens=120)
assert isinstance(parsed.choices[0].message.parsed, City)
with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "a city"}],
        response_format=City, max_tokens=120) as stream:
    for _ in stream: pass
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)
""",
    ),
    "anthropic": (
        "anthropic",
        """
import anthropic
client = anthropic.Anthropic(base_url=ROOT, api_key="none", max_retries=0)
said = client.messages.create(model=MODEL, max_tokens=16, messages=[{"role": "user", "content": "def add("}])
assert said.content[0].text and said.usage.output_tokens
with client.messages.stream(model=MODEL, max_tokens=16, messages=[{"role": "user", "content": "def add("}]) as stream:
    assert "".join(stream.text_stream) and stream.get_final_message().stop_reason
assert client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "def add("}]).input_tokens
called = client.messages.create(model=MODEL, max_tokens=200, messages=[{"role": "user", "content": "weather"}],
    tools=[{"name": "weather", "input_schema": TOOL["function"]["parameters"]}], tool_choice={"type": "any"})
assert called.stop_reason == "tool_use" and called.content[-1].input["city"] in ("Rome", "Oslo")
""",
    ),
    "litellm": (
        "litellm",
        """
import litellm
litellm.suppress_debug_info = True
for kind in ("openai/", "hosted_vllm/"):
    ask = dict(model=kind + MODEL, api_base=BASE, api_key="none", messages=[{"role": "user", "content": "def add("}])
    assert litellm.completion(max_tokens=16, **ask).choices[0].message.content
    assert "".join(p.choices[0].delta.content or "" for p in litellm.completion(max_tokens=16, stream=True, **ask))
    try:
        litellm.completion(max_tokens=1, **{**ask, "messages": [{"role": "user", "content": "word " * 50_000}]})
    except litellm.ContextWindowExceededError: pass
    else: raise AssertionError("no ContextWindowExceededError")
""",
    ),
    "langchain-openai": (
        "langchain-openai",
        """
from langchain_openai import ChatOpenAI
from langchain_core.tools import tool
import pydantic
from typing import Literal
model = ChatOpenAI(model=MODEL, base_url=BASE, api_key="none", max_tokens=120, max_retries=0)
assert model.invoke("def add(").content
assert "".join(c.content for c in model.stream("def add("))
@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    "The weather of a city."
    return "sun"
called = model.bind_tools([weather], tool_choice="required").invoke("weather")
assert called.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
class City(pydantic.BaseModel):
    name: Literal["Rome", "Oslo"]
assert isinstance(model.with_structured_output(City, method="json_schema").invoke("a city"), City)
assert isinstance(model.with_structured_output(City, method="function_calling").invoke("a city"), City)
""",
    ),
    "llm": (
        "llm",
        """
import pathlib, os, subprocess, sys, tempfile, json
home = pathlib.Path(tempfile.mkdtemp())
(home / "extra-openai-models.yaml").write_text(json.dumps([{"model_id": "dw", "model_name": MODEL, "api_base": BASE}]))
for more in ([], ["--no-stream"]):
    done = subprocess.run([sys.executable, "-m", "llm", "-m", "dw", "-o", "max_tokens", "16", *more, "def add("],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "LLM_USER_PATH": str(home)})
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
""",
    ),
    "instructor": (
        "instructor",
        """
import instructor, openai, pydantic
from typing import Literal
class City(pydantic.BaseModel):
    name: Literal["Rome", "Oslo"]
raw = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(raw, mode=mode)
    got = client.chat.completions.create(model=MODEL, response_model=City, max_tokens=120, max_retries=1,
        messages=[{"role": "user", "content": "a city"}])
    assert isinstance(got, City), mode
""",
    ),
    "pydantic-ai": (
        "pydantic-ai-slim",
        """
import pydantic
from typing import Literal
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
class City(pydantic.BaseModel):
    name: Literal["Rome", "Oslo"]
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
    assert Agent(model, model_settings={"max_tokens": 16}).run_sync("def add(").output
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
agent = Agent(model, output_type=City, model_settings={"max_tokens": 200})
assert isinstance(agent.run_sync("a city").output, City)
""",
    ),
    "openai-agents": (
        "openai-agents",
        """
import asyncio, pydantic
from typing import Literal
from agents import Agent, AsyncOpenAI, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from agents import set_tracing_disabled
set_tracing_disabled(True)
class City(pydantic.BaseModel):
    name: Literal["Rome", "Oslo"]
async def main():
    # Over /v1/responses an answer that was cut at max_tokens is an error for this client, and a schema ends one.
    for kind, form, tokens in ((OpenAIChatCompletionsModel, None, 16), (OpenAIResponsesModel, City, 200)):
        model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key="none"))
        agent = Agent(name="coder", model=model, output_type=form, model_settings=ModelSettings(max_tokens=tokens))
        assert (await Runner.run(agent, "def add(")).final_output
        streamed = Runner.run_streamed(agent, "def add(")
        async for _ in streamed.stream_events(): pass
        assert streamed.final_output
asyncio.run(main())
""",
    ),
    "llama-index": (
        "llama-index-llms-openai-like",
        """
from llama_index.llms.openai_like import OpenAILike
model = OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=True, max_tokens=16, max_retries=0)
assert str(model.complete("def add("))
assert [c for c in model.stream_complete("def add(")][-1].text
plain = OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=False, max_tokens=16, max_retries=0)
assert str(plain.complete("def add("))
""",
    ),
    "dspy": (
        "dspy",
        """
import dspy
model = dspy.LM("openai/" + MODEL, api_base=BASE, api_key="none", max_tokens=16, cache=False, num_retries=0)
assert model("def add(")[0]
""",
    ),
    "smolagents": (
        "smolagents",
        """
from smolagents import OpenAIServerModel
model = OpenAIServerModel(model_id=MODEL, api_base=BASE, api_key="none", max_tokens=16)
ask = [{"role": "user", "content": [{"type": "text", "text": "def add("}]}]
assert model(ask).content
assert "".join(piece.content or "" for piece in model.generate_stream(ask))
""",
    ),
    "haystack": (
        "haystack-ai",
        """
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
model = OpenAIChatGenerator(api_key=Secret.from_token("none"), api_base_url=BASE, model=MODEL, max_retries=0,
    generation_kwargs={"max_tokens": 16})
assert model.run([ChatMessage.from_user("def add(")])["replies"][0].text
""",
    ),
    "requests": (
        "requests",
        """
import json, requests
with requests.post(BASE + "/completions", json={"model": MODEL, "prompt": "def f(", "max_tokens": 8, "stream": True},
        stream=True, timeout=60) as answer:
    lines = [line for line in answer.iter_lines(decode_unicode=True) if line]
assert lines[-1] == "data: [DONE]" and json.loads(lines[0][6:])["choices"]
""",
    ),
}
"""Of each client: the distribution whose version is printed, and the program."""

HEAD = """
import sys, warnings
warnings.simplefilter("ignore")
ROOT, MODEL = sys.argv[1], sys.argv[2]
BASE = ROOT + "/v1"
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters":
    {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"],
     "additionalProperties": False}}}
"""

ENVIRONMENT = {
    "OPENAI_API_KEY": "none",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LLM_LOAD_PLUGINS": "",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def version(python: str, distribution: str) -> str | None:
    """The version of ``distribution`` beside ``python``, None where it is not installed."""
    if python == sys.executable:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run([python, "-c", ask, distribution], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--python", default=sys.executable, help="the Python that has the clients (default: this one)"
    )
    parser.add_argument("--only", choices=PROGRAMS, nargs="+", help="these clients alone")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one client (default: 120)")
    options = parser.parse_args()

    port = free_port()
    root = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "draftwise", "serve", "--port", str(port), "--served-model-name", "demo"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(root, server)
            failed = sum(
                run(name, options.python, root, options.timeout) for name in options.only or PROGRAMS
            )
        finally:
            server.terminate()
            code = server.wait(30)
    if code not in (0, 143, -15):
        print(f"the server ended with {code}")
        return 1
    return 1 if failed else 0


def wait_for(root: str, server: subprocess.Popen[bytes]) -> None:
    """Waits until the server answers.

    Raises:
        SystemExit: it ended, or did not answer within a minute.
    """
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(root + "/health", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not answer within a minute")


def run(name: str, python: str, root: str, timeout: float) -> bool:
    """Runs one client and prints its line; True if it failed."""
    distribution, program = PROGRAMS[name]
    found = version(python, distribution)
    if found is None:
        print(f"{name:18} {'':10} absent", flush=True)
        return False
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT
    try:
        done = subprocess.run(
            [python, "-c", HEAD + program, root, "demo"],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        print(f"{name:18} {found:10} FAILED   did not end within {timeout:.0f} s", flush=True)
        return True
    failed = done.returncode != 0
    print(f"{name:18} {found:10} {'FAILED' if failed else 'works'}", flush=True)
    if failed:
        print("    " + "\n    ".join(done.stderr.strip().splitlines()[-12:]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
