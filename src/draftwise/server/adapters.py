"""Adapters loaded and unloaded over HTTP, as in vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from draftwise.errors import RequestError
from draftwise.server.context import Context
from draftwise.server.errors import bad_request
from draftwise.server.protocol import LoadAdapterBody, UnloadAdapterBody


async def load_adapter(context: Context, request: Request, body: LoadAdapterBody) -> Response:
    """``POST /v1/load_lora_adapter``."""
    if not context.engine.config.enable_lora:
        raise bad_request("this server was started without --enable-lora", "lora_name")
    if body.lora_name in context.config.model_names:
        raise bad_request(f"{body.lora_name!r} is the name of the model", "lora_name")
    if body.load_inplace:
        raise bad_request("load_inplace: not supported; unload the adapter first", "load_inplace")
    if not body.lora_name:
        raise bad_request("lora_name is empty", "lora_name")
    try:
        await context.adapters.load(context.engine, body.lora_name, body.lora_path)
    except RequestError as error:  # about the field of `LLM.generate`, which clients do not know
        raise bad_request(str(error).removeprefix("lora_request: "), "lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(context: Context, request: Request, body: UnloadAdapterBody) -> Response:
    """``POST /v1/unload_lora_adapter``."""
    await context.adapters.unload(context.engine, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
