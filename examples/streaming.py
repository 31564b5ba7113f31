"""Several readers of one engine: two stream to the end, one leaves early and its request is dropped.

Run it with ``python examples/streaming.py``.
"""

import asyncio

from draftwise import AsyncLLM, SamplingParams


async def read(llm: AsyncLLM, prompt: str, patience: int) -> str:
    """Collect pieces of text until the end, or until ``patience`` tokens are there."""
    params = SamplingParams(seed=1, max_tokens=64, output_kind="delta", ignore_eos=True)
    text, tokens = "", 0
    stream = llm.generate(prompt, params)
    async for output in stream:
        text += output.outputs[0].text
        tokens += len(output.outputs[0].token_ids)
        if tokens >= patience:
            break
    await stream.aclose()  # type: ignore[attr-defined]  # leaving aborts the request
    return text


async def main() -> None:
    async with AsyncLLM() as llm:
        prompts = ["def read(", "class Reader", "import "]
        texts = await asyncio.gather(
            *(read(llm, prompt, patience) for prompt, patience in zip(prompts, (64, 64, 8), strict=True))
        )
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt!r} + {text!r}")
        print("still running:", llm.stats().num_running)


if __name__ == "__main__":
    asyncio.run(main())
