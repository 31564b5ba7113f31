"""Requests of one batch, each speculating in its own way: every one gets the text it would get alone.

Run it with ``python examples/mixed_methods.py``.
"""

from draftwise import LLM, SamplingParams

PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def"
CHOICES = (
    {"method": "none"},
    {"method": "ngram"},
    {"method": "draft_model"},
    {"method": "draft_model", "num_speculative_tokens": 2},
)


def main() -> None:
    params = [SamplingParams(temperature=0, max_tokens=48, speculation=choice) for choice in CHOICES]
    with LLM() as llm:
        outputs = llm.generate([PROMPT] * len(params), params)
    for choice, output in zip(CHOICES, outputs, strict=True):
        print(f"{output.metrics.speculation.num_steps:3} steps with {choice}")
    print("all the same tokens:", len({output.outputs[0].token_ids for output in outputs}) == 1)


if __name__ == "__main__":
    main()
