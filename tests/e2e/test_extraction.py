"""Hidden states that go to files: the method, and the command around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from draftwise import LLM, ConfigError, RequestError, SamplingParams
from draftwise.cli.main import main
from draftwise.train import extract as extraction
from draftwise.train.extract import Job, extract
from draftwise.train.heads.shards import read_shards
from draftwise.train.heads.teacher import EngineTeacher
from tests.e2e.conftest import random_prompts
from tests.fakes.tiny import VOCAB, TinyModels

ONE = SamplingParams(max_tokens=1, temperature=0)


def options(folder: Path, layers: list[int]) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


@pytest.mark.parametrize(
    "more", [{}, {"max_num_batched_tokens": 11, "max_num_seqs": 4}, {"num_kv_blocks": 24, "max_num_seqs": 6}]
)
def test_files_hold_what_the_layers_see(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Against Transformers, in chunks, with a prefix cache that must not be used, and beside other requests."""
    import transformers

    reference = transformers.LlamaForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    llm = make_llm(**options(tmp_path / "out", [2, 0, 1]), **more)
    prompts = random_prompts(6, seed=1)
    prompts += [dict(p) for p in prompts[:2]]
    params = [ONE] * len(prompts)
    params[3] = SamplingParams(max_tokens=9, temperature=0, speculation={"method": "ngram"})
    outputs = llm.generate(prompts, params)
    assert outputs[3].kv_transfer_params is None and len(outputs[3].outputs[0].token_ids) == 9
    captured: list[torch.Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if i == 3:
            continue
        assert output.kv_transfer_params is not None
        path = output.kv_transfer_params["hidden_states_path"]
        held = load_file(path)
        ids = prompt["prompt_token_ids"]
        assert held["token_ids"].tolist() == ids and held["token_ids"].dtype == torch.int64
        with torch.no_grad():
            states = reference.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        wanted = torch.stack(
            [captured[-1][0], states[0][0], states[1][0]], dim=1
        )  # leaving the last: before the norm
        assert held["hidden_states"].shape == (len(ids), 3, 32)
        torch.testing.assert_close(held["hidden_states"], wanted, atol=1e-4, rtol=1e-4)
        with safe_open(path, framework="pt") as handle:
            assert json.loads(handle.metadata()["layers"]) == [2, 0, 1]
    assert len(list((tmp_path / "out").iterdir())) >= 5


def test_what_cannot_work_is_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    good = options(tmp_path, [1])
    llm = make_llm(**good)
    with pytest.raises(RequestError, match="max_tokens and n must be 1, got 5 and 1"):
        llm.generate({"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=5))
    with pytest.raises(ConfigError, match="3 is not a layer of the target, which has 2"):
        make_llm(**options(tmp_path, [1, 3]))
    spec = good["speculative_config"]
    for change, message in (
        ({"draft_model_config": {}}, "needs the layers to extract"),
        ({"draft_model_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}, "distinct layers"),
        ({"draft_model_config": {"layers": [1]}}, "unknown field 'layers'"),
        ({"num_speculative_tokens": 2}, "num_speculative_tokens: must be 1"),
        ({"speculative_token_tree": [[0]]}, "speculative_token_tree"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(speculative_config=spec | change)
    connector = good["kv_transfer_config"]
    for change, message in (
        ({"kv_connector": "LMCacheConnector"}, "'LMCacheConnector' is not supported"),
        ({"kv_role": "kv_consumer"}, "kv_role"),
        ({"kv_connector_extra_config": {}}, "shared_storage_path"),
        ({"kv_buffer": 3}, "unknown field 'kv_buffer'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(speculative_config=spec, kv_transfer_config=connector | change)
    with pytest.raises(ConfigError, match="kv_transfer_config: only for method 'extract_hidden_states'"):
        make_llm(speculative_config={"method": "ngram"}, kv_transfer_config=connector)


def test_a_file_that_cannot_be_written_fails_its_request_alone(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    llm = make_llm(**options(tmp_path / "taken", [1]))
    prompts = random_prompts(2, seed=1)
    lost, fine = llm.generate(
        prompts, [ONE, SamplingParams(max_tokens=4, temperature=0, speculation={"method": "none"})]
    )
    assert lost.outputs[0].finish_reason == "error" and "Error" in (lost.outputs[0].error or "")
    assert fine.outputs[0].finish_reason == "length"


# --------------------------------------------------------------------------------------------- the command


@pytest.fixture
def model(tiny: TinyModels, tmp_path: Path) -> str:
    """The tiny target with a tokenizer of words."""
    import shutil

    import tokenizers
    import transformers

    folder = tmp_path / "target"
    shutil.copytree(tiny.target, folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return str(folder)


def corpus(tmp_path: Path, texts: int = 7) -> Path:
    """Texts of 3, 13, 23, ... words, the second one of one word."""
    lines = []
    for i in range(texts):
        words = ["w5"] if i == 1 else [f"w{3 + (i * 7 + j) % 50}" for j in range(3 + 10 * i)]
        lines.append(json.dumps({"text": " ".join(words)}))
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["extract", *arguments]) == code
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out) if code == 0 else {}
    return found


def test_the_command_and_what_it_leaves(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [
        "--model",
        model,
        "--data",
        str(corpus(tmp_path)),
        "--dtype",
        "float32",
        "--json",
        "--num-kv-blocks",
        "64",
    ]
    files = run(capsys, *base, "--output", str(tmp_path / "files"), "--layers", "1", "2")
    assert files["texts"] == 7 and files["skipped"] == 1 and files["files"] == 6
    assert files["tokens"] == 3 + 23 + 33 + 43 + 53 + 63
    shards = run(
        capsys, *base, "--output", str(tmp_path / "shards"), "--layers", "1", "2", "--tokens-per-shard", "50",
        "--max-length", "20",
    )  # fmt: skip
    assert shards["tokens"] == files["tokens"] and 1 < shards["files"] < 6
    texts = [load_file(str(path)) for path in sorted((tmp_path / "files").glob("*.safetensors"))]
    held = [load_file(str(path)) for path in sorted((tmp_path / "shards").glob("*.safetensors"))]
    assert torch.cat([t["token_ids"] for t in held]).equal(torch.cat([t["token_ids"] for t in texts]))
    for part in held:
        assert part["starts"][0] == 0 and part["starts"][-1] == len(part["token_ids"])
        assert int(part["starts"].diff().max()) <= 20
    # Training reads them.
    teacher = EngineTeacher(model, (1,), torch.float32, torch.device("cpu"))
    # It leaves out pieces of fewer than 8 tokens: the first text, and the ends of those that were cut at 20, 40 and 60.
    for folder, left_out in (("files", 3), ("shards", 4 * 3)):
        read = read_shards(tmp_path / folder, teacher, 512)
        assert sum(len(piece.ids) for piece in read.pieces) == files["tokens"] - left_out
        assert read.features == (0,) and read.last == 1
    # Again: nothing is left to do. Another question in the same folder is refused.
    assert run(capsys, *base, "--output", str(tmp_path / "files"), "--layers", "1", "2")["new_tokens"] == 0
    run(capsys, *base, "--output", str(tmp_path / "files"), "--layers", "2", code=2)
    run(capsys, *base, "--output", str(tmp_path / "new"), "--layers", "9", code=2)
    run(capsys, *base, "--output", str(tmp_path / "texts.jsonl"), code=2)
    run(capsys, *base, "--output", str(tmp_path / "texts.jsonl" / "below"), code=2)  # before it computes
    again = [*base, "--output", str(tmp_path / "files"), "--layers", "1", "2"]
    run(capsys, *again, "--dtype", "bfloat16", code=2)
    data = tmp_path / "texts.jsonl"
    data.write_text(data.read_text().replace("w12", "w13"))  # as long as before
    run(capsys, *again, code=2)
    run(
        capsys,
        "--model",
        model,
        "--data",
        str(tmp_path / "none.txt"),
        "--output",
        str(tmp_path / "x"),
        code=2,
    )
    assert not (tmp_path / "files" / "parts").exists()


@pytest.mark.parametrize("shard_tokens", [None, 40])
def test_an_interrupted_run_goes_on(
    make_llm: Callable[..., LLM],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_tokens: int | None,
) -> None:
    """Stopped in the middle of a group, again and again: what is there in the end is what one run leaves."""
    monkeypatch.setattr(extraction, "_GROUP_TOKENS", 40)

    def job(name: str) -> Job:
        return Job((corpus(tmp_path),), tmp_path / name, model, (0, 2), 64, shard_tokens)

    def engine(name: str) -> LLM:
        return make_llm(model=model, skip_tokenizer_init=False, **options(job(name).parts, [0, 2]))

    extract(engine("whole"), job("whole"))
    llm = engine("parts")
    generate = llm.generate
    calls = 0

    def interrupted(prompts: Any, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            generate(prompts[:1], *args, **more)
            raise KeyboardInterrupt
        return generate(prompts, *args, **more)

    monkeypatch.setattr(llm, "generate", interrupted)
    stops = 0
    while True:
        try:
            progress = extract(llm, job("parts"))
            break
        except KeyboardInterrupt:
            stops += 1
            assert not list((tmp_path / "parts").glob("**/*.part"))
    assert stops > 2 and progress.done
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "parts").iterdir())
    for name in names:
        if name.endswith(".safetensors"):
            one, two = load_file(str(tmp_path / "whole" / name)), load_file(str(tmp_path / "parts" / name))
            assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    (tmp_path / "parts" / names[-1]).unlink()
    with pytest.raises(ConfigError, match=f"{names[-1]}: is missing"):
        extract(llm, job("parts"))
