"""A proposer of your own: guess that the token pair seen last is followed by what followed it before.

Run it with ``python examples/custom_proposer.py``. Whatever a proposer guesses, the output stays the target's:
a bad one is only slow.
"""

from collections.abc import Sequence
from itertools import pairwise

from draftwise import LLM, SamplingParams, register_proposer
from draftwise.propose.base import DraftRow, Proposer
from draftwise.types import Proposal, chain


class Bigram(Proposer):
    """Follows, from token to token, what came after each pair of tokens the last time."""

    name = "bigram"

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self.guess(row) for row in rows]

    def guess(self, row: DraftRow) -> Proposal:
        tokens = row.token_ids_np.tolist()
        follower = dict(zip(pairwise(tokens), tokens[2:], strict=False))
        drafts: list[int] = []
        pair = tuple(tokens[-2:])
        while pair in follower and len(drafts) < min(row.budget, row.max_depth):
            drafts.append(follower[pair])
            pair = (pair[-1], drafts[-1])
        return chain(drafts, self.name)


def main() -> None:
    register_proposer("bigram", Bigram)
    prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def"
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(speculative_config={"method": "bigram", "num_speculative_tokens": 4}) as llm:
        speculative = llm.generate(prompt, params)[0]
        plain = llm.generate(prompt, params.replace(speculation={"method": "none"}))[0]
    print(prompt + speculative.outputs[0].text)
    print("---")
    print("same tokens as plain decoding:", speculative.outputs[0].token_ids == plain.outputs[0].token_ids)
    accepted = speculative.metrics.speculation.mean_acceptance_length
    print(f"tokens per verification: {accepted:.2f}")


if __name__ == "__main__":
    main()
