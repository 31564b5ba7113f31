"""Run by vLLM's own interpreter: the drafts of its first steps, as JSON.

Reads ``{"model": folder, "speculative": {...}, "prompt": [ids], "max_tokens": n}`` from stdin, writes one line
``DRAFTS {"tokens": [output ids], "drafts": [[ids of a step], ...]}`` to stdout.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # the engine runs in this process, where its drafts can be seen
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    asked = json.load(sys.stdin)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    drafts = []
    propose = GPUModelRunner.propose_draft_token_ids

    def recording(self, *args, **kwargs):
        found = propose(self, *args, **kwargs)
        rows = found if isinstance(found, list) else found.tolist()
        drafts.append(rows[0])
        return found

    GPUModelRunner.propose_draft_token_ids = recording
    llm = LLM(
        model=asked["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        speculative_config=asked["speculative"],
        seed=0,
    )
    drafts.clear()
    params = SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False
    )
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=asked["prompt"])], params, use_tqdm=False)
    print("DRAFTS " + json.dumps({"tokens": list(output.outputs[0].token_ids), "drafts": drafts}), flush=True)


if __name__ == "__main__":
    main()
