"""Adapters: a request with one gets the text of a model into which it was merged, whoever else is in the batch."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.fakes.architectures import save, small
from tests.fakes.lora import ATTENTION, merge, save_adapter
from tests.fakes.tiny import save_llama
from tests.native import native_or_skip

from draftwise import LLM, AsyncLLM, LoRARequest, SamplingParams
from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError, ModelLoadError, RequestError
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.lora.decoder import part_of
from draftwise.models.lora.peft import read_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS: list[Any] = [
    {"prompt_token_ids": ids} for ids in ([5, 6, 7], [5, 6, 7], [9] * 20, [3, 1, 4, 1, 5], [5, 6, 7])
]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "num_kv_blocks": 64,
    "num_threads": 1,
    "dtype": "float32",
}


class World:
    """A model, three adapters of it, and the models into which each is merged."""

    def __init__(self, root: Path) -> None:
        self.model = save_llama(root / "model", seed=1)
        self.draft = save_llama(root / "draft", seed=1, noise=0.02)
        folder = Path(self.model)
        settings: list[dict[str, Any]] = [
            {},
            {"rank": 2, "modules": ATTENTION, "use_rslora": True},
            {
                "rank": 4, "modules": ("q_proj", "down_proj"), "rank_pattern": {"down_proj": 8},
                "alpha_pattern": {"layers.1.self_attn.q_proj": 3},
            },
        ]  # fmt: skip
        self.requests, self.merged = [], []
        for i, setting in enumerate(settings, 1):
            path = save_adapter(root / f"adapter{i}", folder, i, **setting)
            self.requests.append(LoRARequest(f"adapter{i}", i, path))
            self.merged.append(merge(folder, Path(path), root / f"merged{i}"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def wanted(world: World) -> list[list[tuple[int, ...]]]:
    """Texts of the model and of each merged one, for every prompt."""
    found = []
    for model in (world.model, *world.merged):
        with LLM(model, **OPTIONS) as llm:
            found.append(texts(llm.generate(PROMPTS, GREEDY)))
    return found


def texts(outputs: Any) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def llm(world: World) -> Iterator[LLM]:
    drafter = {"model": world.draft, "num_speculative_tokens": 3}
    with LLM(
        world.model, enable_lora=True, speculative_config=drafter, speculation_control="static", **OPTIONS
    ) as engine:
        yield engine


@pytest.mark.parametrize("method", ["none", "draft_model", "ngram"])
def test_a_batch_of_all_adapters_is_the_merged_models(
    llm: LLM, world: World, wanted: list[list[tuple[int, ...]]], method: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation={"method": method})
    order = [0, 1, 2, 3, 1]  # adapter of each prompt; 0: none
    requests = [None if i == 0 else world.requests[i - 1] for i in order]
    found = texts(llm.generate(PROMPTS, params, lora_request=requests))
    assert found == [wanted[i][prompt] for prompt, i in enumerate(order)]
    again = texts(llm.generate(PROMPTS, params, lora_request=requests))
    assert again == found, "prefixes of one adapter are no other's"
    llm.check_integrity()


def test_ranks_add_their_parts_of_an_adapter(world: World, wanted: list[list[tuple[int, ...]]]) -> None:
    order = [0, 1, 2, 3, 1]
    requests = [None if i == 0 else world.requests[i - 1] for i in order]
    expected = [wanted[i][prompt] for prompt, i in enumerate(order)]
    drafter = {"model": world.draft, "num_speculative_tokens": 3}
    with LLM(
        world.model, enable_lora=True, tensor_parallel_size=2, speculative_config=drafter,
        speculation_control="static", worker_timeout=60, **OPTIONS,
    ) as pair:  # fmt: skip
        assert texts(pair.generate(PROMPTS, GREEDY, lora_request=requests)) == expected
        plain = GREEDY.replace(speculation={"method": "none"})
        assert texts(pair.generate(PROMPTS, plain, lora_request=requests)) == expected
        other = LoRARequest("other", 9, world.requests[0].lora_path + "-none")
        with pytest.raises(RequestError, match="lora_request"):
            pair.generate(PROMPTS[:1], GREEDY, lora_request=other)
        wrong = save_adapter(Path(world.model).parent / "wrong", Path(world.model), 9, modules=("lm_head",))
        with pytest.raises(RequestError, match="no linear layers of these names"):
            pair.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("wrong", 10, wrong))
        assert texts(pair.generate(PROMPTS, GREEDY)) == wanted[0], "ranks go on after a refusal"


def test_one_adapter_for_all_and_trees(llm: LLM, world: World, wanted: list[list[tuple[int, ...]]]) -> None:
    tree = {"method": "draft_model", "speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0]]}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation=tree)
    assert texts(llm.generate(PROMPTS, params, lora_request=world.requests[0])) == wanted[1]
    assert texts(llm.generate(PROMPTS, params)) == wanted[0]


def test_prefixes_are_shared_within_an_adapter_alone(llm: LLM, world: World) -> None:
    prompt = [{"prompt_token_ids": [7, 8] * 20}]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def cached(request: LoRARequest | None) -> int:
        return llm.generate(prompt, params, lora_request=request)[0].num_cached_tokens

    assert [cached(None), cached(None)] == [0, 32]
    assert [cached(world.requests[0]), cached(world.requests[0])] == [0, 32]
    assert [cached(world.requests[1]), cached(None)] == [0, 32]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_row_are_its_own(world: World, dtype: str) -> None:
    """Log-probabilities, to the last bit: alone, beside others, and, without adapter, of an engine that takes none."""
    native_or_skip()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
    options = OPTIONS | {"dtype": dtype, "enable_prefix_caching": False}

    def facts(outputs: Any) -> list[Any]:
        return [
            [sorted((t, e.logprob) for t, e in position.items()) for position in o.outputs[0].logprobs]
            for o in outputs
        ]

    with LLM(world.model, **options) as plain:
        without = facts(plain.generate(PROMPTS, params))
    with LLM(world.model, enable_lora=True, **options) as engine:
        requests = [None, world.requests[0], None, world.requests[1], world.requests[0]]
        together = facts(engine.generate(PROMPTS, params, lora_request=requests))
        alone = [
            facts(engine.generate([prompt], params, lora_request=[request]))[0]
            for prompt, request in zip(PROMPTS, requests, strict=True)
        ]
    assert together == alone
    assert together[0] == without[0] and together[2] == without[2]
    assert together[1] != without[1] and together[1] == together[4]


@pytest.mark.parametrize("quantization", ["int8", "int4_weight_only_g32"])
def test_over_rounded_weights(world: World, quantization: str) -> None:
    """The adapter itself is not rounded: what it adds to a layer is what it adds to a float one."""
    native_or_skip()
    options = OPTIONS | {"dtype": "bfloat16", "quantization": quantization}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    differences = []
    for request in (None, world.requests[0]):
        found = []
        for model, adapter in ((world.model, request), (world.merged[0] if request else world.model, None)):
            kept = options if model == world.model else OPTIONS
            with LLM(model, enable_lora=True, **kept) as engine:
                (output,) = engine.generate(PROMPTS[:1], params, lora_request=adapter)
                assert output.outputs[0].logprobs is not None
                found.append({t: e.logprob for t, e in output.outputs[0].logprobs[0].items()})
        shared = found[0].keys() & found[1].keys()
        assert len(shared) >= 10
        differences.append(np.mean([abs(found[0][t] - found[1][t]) for t in shared]))
    assert differences[1] < 0.5, differences


def test_a_model_of_transformers(tmp_path: Path) -> None:
    base = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("starcoder2", **base)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    path = save_adapter(tmp_path / "a", tmp_path / "model", 1, modules=(*ATTENTION, "c_fc", "c_proj"))
    merged = merge(tmp_path / "model", tmp_path / "a", tmp_path / "merged")
    with LLM(merged, **OPTIONS) as engine:
        expected = texts(engine.generate(PROMPTS, GREEDY))
    with LLM(str(tmp_path / "model"), enable_lora=True, **OPTIONS) as engine:
        plain = texts(engine.generate(PROMPTS, GREEDY))
        found = texts(engine.generate(PROMPTS, GREEDY, lora_request=LoRARequest("a", 1, path)))
        mixed = texts(engine.generate(PROMPTS[:2], GREEDY, lora_request=[None, LoRARequest("a", 1, path)]))
    assert found == expected and found != plain
    assert mixed == [plain[0], expected[1]]


_FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("gpt_neox", _FUSED),  # q, k and v in turns in one layer, a part of a head is rotated
        ("glm4", (*ATTENTION, "gate_up_proj", "down_proj")),  # neighbours are rotated
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),  # code of our own, a part is rotated
        ("gpt2", ("c_attn", "c_proj", "c_fc")),  # weights are [inputs, outputs]
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_layers_whose_rows_stand_in_another_order(
    kind: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    save(small(kind, initializer_range=0.3), tmp_path / "model")
    turned = kind == "gpt2"
    path = save_adapter(
        tmp_path / "a", tmp_path / "model", 1, modules=modules, size=0.1, turned=turned, fan_in_fan_out=turned
    )
    merged = merge(tmp_path / "model", tmp_path / "a", tmp_path / "merged")
    with LLM(merged, **OPTIONS) as engine:
        expected = texts(engine.generate(PROMPTS, GREEDY))
    with LLM(str(tmp_path / "model"), enable_lora=True, **OPTIONS) as engine:
        assert engine.guarantees.same_bits or engine._engine is None
        plain = texts(engine.generate(PROMPTS, GREEDY))
        which = [LoRARequest("a", 1, path), None] * len(PROMPTS)
        found = texts(engine.generate(PROMPTS, GREEDY, lora_request=which[: len(PROMPTS)]))
    assert plain != expected
    assert found == [(plain if i % 2 else expected)[i] for i in range(len(PROMPTS))]


def test_a_layer_of_which_only_a_part_takes_additions_is_named(tmp_path: Path) -> None:
    """Latent attention absorbs what makes keys and values of a latent."""
    save(small("minicpm3"), tmp_path / "model")
    path = save_adapter(tmp_path / "a", tmp_path / "model", 1, modules=("kv_b_proj",))
    with (
        LLM(str(tmp_path / "model"), enable_lora=True, **OPTIONS) as engine,
        pytest.raises(RequestError, match="kv_b_proj"),
    ):
        engine.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("a", 1, path))


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        pytest.param("jamba", ("in_proj", "x_proj", "out_proj", "q_proj"), marks=pytest.mark.slow),
        ("bloom", ("query_key_value", "dense")),
    ],
)
def test_several_adapters_where_rows_are_not_computed_in_order(
    kind: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """Modules with recurrent state, and attention of a model's own, are computed request by request."""
    save(small(kind, initializer_range=0.3), tmp_path / "model")
    paths = [save_adapter(tmp_path / f"a{i}", tmp_path / "model", i, modules=modules) for i in (1, 2)]
    expected = []
    for i in (1, 2):
        merged = merge(tmp_path / "model", tmp_path / f"a{i}", tmp_path / f"merged{i}")
        with LLM(merged, **OPTIONS) as engine:
            expected.append(texts(engine.generate(PROMPTS, GREEDY)))
    with LLM(str(tmp_path / "model"), enable_lora=True, **OPTIONS) as engine:
        plain = texts(engine.generate(PROMPTS, GREEDY))
        one, other = (LoRARequest(f"a{i}", i, path) for i, path in enumerate(paths, 1))
        which = ([one, other, None] * len(PROMPTS))[: len(PROMPTS)]
        found = texts(engine.generate(PROMPTS, GREEDY, lora_request=which))
    assert plain != expected[0] != expected[1]
    assert found == [[*expected, plain][i % 3][i] for i in range(len(PROMPTS))]


# --------------------------------------------------------------------------------------------- places for adapters


def test_the_least_recently_used_makes_room(world: World, wanted: list[list[tuple[int, ...]]]) -> None:
    with LLM(world.model, enable_lora=True, max_loras=2, **OPTIONS) as engine:
        for i in (0, 1, 0, 2, 1, 0):
            found = texts(engine.generate(PROMPTS[:1], GREEDY, lora_request=world.requests[i]))
            assert found == [wanted[i + 1][0]]
        assert texts(engine.generate(PROMPTS[:1], GREEDY, lora_request=world.requests[1])) == [wanted[2][0]]


def test_more_adapters_in_a_call_than_places_wait_for_one_another(
    world: World, wanted: list[list[tuple[int, ...]]], tmp_path: Path
) -> None:
    asked = [None, *world.requests, world.requests[0]]
    absent = LoRARequest("absent", 9, str(tmp_path / "nothing"))
    for places in (1, 2):
        with LLM(world.model, enable_lora=True, max_loras=places, **OPTIONS) as engine:
            for _ in range(2):
                found = texts(engine.generate(PROMPTS[:5], GREEDY, lora_request=asked))
                assert found == [wanted[(0, 1, 2, 3, 1)[i]][i] for i in range(5)]
            computed = engine.stats().num_requests_finished
            with pytest.raises(RequestError, match="does not exist"):  # before anything is run
                engine.generate(PROMPTS[:4], GREEDY, lora_request=[*world.requests, absent])
            assert engine.stats().num_requests_finished == computed
            engine.check_integrity()


def test_requests_of_an_asynchronous_engine_wait_for_places(
    world: World, wanted: list[list[tuple[int, ...]]]
) -> None:
    asked = [None, *world.requests, *world.requests, None]

    async def one(llm: AsyncLLM, i: int) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        async for output in llm.generate(PROMPTS[i % 5], GREEDY, lora_request=asked[i]):
            found = tuple(output.outputs[0].token_ids)
        return found

    async def all_of_them(**options: Any) -> list[tuple[int, ...]]:
        async with AsyncLLM(world.model, enable_lora=True, max_loras=1, **options, **OPTIONS) as llm:
            found = await asyncio.gather(*(one(llm, i) for i in range(len(asked))))
            llm.check_integrity()
            assert await one(llm, 1) == found[1]
            return found

    expected = [wanted[(0, 1, 2, 3, 1, 2, 3, 0)[i]][i % 5] for i in range(len(asked))]
    assert asyncio.run(all_of_them()) == expected
    assert asyncio.run(all_of_them(async_scheduling=True)) == expected


def test_as_many_as_are_kept_need_no_file(
    world: World, wanted: list[list[tuple[int, ...]]], tmp_path: Path
) -> None:
    copies = []
    for i, known in enumerate(world.requests, 1):
        shutil.copytree(known.lora_path, tmp_path / str(i))
        copies.append(LoRARequest(f"copy{i}", i, str(tmp_path / str(i))))
    with pytest.raises(ConfigError, match="max_cpu_loras: 1 is under max_loras = 2"):
        LLM(world.model, enable_lora=True, max_loras=2, max_cpu_loras=1, **OPTIONS)
    with LLM(world.model, enable_lora=True, max_loras=1, max_cpu_loras=2, **OPTIONS) as engine:
        for copy in (*copies, copies[1]):  # the first is forgotten when the third is read
            engine.generate(PROMPTS[:1], GREEDY, lora_request=copy)
        for copy in copies:
            shutil.rmtree(copy.lora_path)
        found = texts(engine.generate(PROMPTS[:2], GREEDY, lora_request=copies[1:]))
        assert found == [wanted[2][0], wanted[3][1]]
        with pytest.raises(RequestError, match="does not exist"):
            engine.generate(PROMPTS[:1], GREEDY, lora_request=copies[0])


def test_requests_that_make_no_sense(llm: LLM, world: World, tmp_path: Path) -> None:
    first = world.requests[0]
    llm.generate(PROMPTS[:1], GREEDY, lora_request=first)
    with pytest.raises(RequestError, match="lora_int_id 1 is 'adapter1'"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("other", 1, world.requests[1].lora_path))
    with pytest.raises(RequestError, match="does not exist"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("x", 9, str(tmp_path / "nothing")))
    with pytest.raises(RequestError, match="5 prompts but 2 lora_requests"):
        llm.generate(PROMPTS, GREEDY, lora_request=[first, None])
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request=["adapter1"])  # type: ignore[list-item]
    for arguments, words in (
        (("", 1, "p"), "lora_name"), (("n", 0, "p"), "lora_int_id"), (("n", True, "p"), "lora_int_id"),
        (("n", 1, ""), "lora_path"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=words):
            LoRARequest(*arguments)  # type: ignore[arg-type]
    with (
        LLM(world.model, **OPTIONS) as plain,
        pytest.raises(RequestError, match=r"started without enable_lora"),
    ):
        plain.generate(PROMPTS[:1], GREEDY, lora_request=first)
    large = save_adapter(tmp_path / "large", Path(world.model), 1, rank=17)
    with pytest.raises(RequestError, match="rank 17, which is over max_lora_rank = 16"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("large", 8, large))
    other = save_adapter(tmp_path / "wide", Path(save_llama(tmp_path / "m", seed=1, intermediate_size=64)), 1)
    with pytest.raises(RequestError, match="the adapter is for"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("wide", 7, other))
    llm.check_integrity()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("peft_type", "LOHA", "type 'LOHA'"),
        ("use_dora", True, "DoRA"),
        ("bias", "all", "bias 'all'"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("init_lora_weights", "pissa_niter_4", "pissa_niter_4"),
        ("init_lora_weights", "lora_ga", "changes the model's own weights"),
        ("target_parameters", ["experts.up"], "target_parameters"),
        ("r", 5, "adapter_config.json says 5"),
        ("lora_alpha", "much", "lora_alpha must be a number"),
        ("rank_pattern", {"*": 8}, "is not understood: nothing to repeat"),
        ("alpha_pattern", ["q_proj"], "is not understood"),
    ],
)
def test_what_is_not_supported_is_named(
    world: World, tmp_path: Path, field: str, value: object, words: str
) -> None:
    path = Path(save_adapter(tmp_path / "a", Path(world.model), 1))
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelLoadError, match=words) as raised:
        read_adapter(str(path))
    assert str(path) in str(raised.value)


def test_odd_tensors_are_named(world: World, tmp_path: Path) -> None:
    path = Path(save_adapter(tmp_path / "a", Path(world.model), 1))
    base = "base_model.model.model.layers.0.self_attn.q_proj"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({}, "it has no tensors"),
        ({f"{base}.lora_A.weight": torch.zeros(4, 32)}, "has only lora_A"),
        (
            {f"{base}.lora_A.weight": torch.zeros(4, 32), f"{base}.lora_B.weight": torch.zeros(32, 3)},
            "not two parts of one product",
        ),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 61)}, "not a low-rank part"),
    ]
    for tensors, words in cases:
        save_file(tensors, path / "adapter_model.safetensors")
        with pytest.raises(ModelLoadError, match=words):
            read_adapter(str(path))
    (path / "adapter_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json is missing"):
        read_adapter(str(path))


def test_layers_that_the_model_lacks_are_named(llm: LLM, world: World, tmp_path: Path) -> None:
    path = Path(save_adapter(tmp_path / "a", Path(world.model), 1, modules=("lm_head",)))
    with pytest.raises(RequestError, match="no linear layers of these names to add to: lm_head"):
        llm.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("a", 6, str(path)))


def test_families_without_place_for_adapters_say_so() -> None:
    from draftwise.models.loader import load_model
    from draftwise.models.lora.decoder import AdaptedDecoder
    from draftwise.models.mapped import MappedDecoder, VocabularyMap

    model = load_model(embedded_path("draft"), dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.arange(4)
    with pytest.raises(ConfigError, match="enable_lora: MappedDecoder does not support adapters"):
        AdaptedDecoder(MappedDecoder(model, VocabularyMap(ids, ids, ids)))


def test_a_drafter_with_an_adapter_is_the_merged_drafter(
    world: World, wanted: list[list[tuple[int, ...]]]
) -> None:
    """Merged as it is read, so that with the target's own weights every draft is accepted."""
    path = world.requests[0].lora_path
    accepted = []
    for lora in (path, None):
        drafter = {"model": world.model, "num_speculative_tokens": 3, **({"lora_path": lora} if lora else {})}
        with LLM(
            world.merged[0], speculative_config=drafter, speculation_control="static", **OPTIONS
        ) as engine:
            outputs = engine.generate(PROMPTS, GREEDY)
            assert texts(outputs) == wanted[1]
            counts = [output.metrics.speculation for output in outputs]
            accepted.append(
                sum(c.num_accepted_tokens for c in counts) / sum(c.num_draft_tokens for c in counts)
            )
    assert accepted[0] > 0.9 > accepted[1]


def test_a_drafters_adapter_that_does_not_fit(world: World, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "wide", Path(save_llama(tmp_path / "m", seed=1, intermediate_size=64)), 1)
    with pytest.raises(ModelLoadError, match="the adapter is for"):
        LLM(world.model, speculative_config={"model": world.model, "lora_path": other}, **OPTIONS)
    head = save_adapter(tmp_path / "deep", Path(save_llama(tmp_path / "d", seed=1, num_hidden_layers=3)), 1)
    with pytest.raises(ModelLoadError, match="no float weights of these layers"):
        LLM(world.model, speculative_config={"model": world.model, "lora_path": head}, **OPTIONS)
    with pytest.raises(ConfigError, match="lora_path: only for method 'draft_model'"):
        LLM(world.model, speculative_config={"method": "ngram", "lora_path": head}, **OPTIONS)


def test_a_part_of_a_batch() -> None:
    tables = np.arange(8, dtype=np.int32)
    rows = [
        RowInput([1, 2, 3], 0, tables[:1]),
        RowInput([4, 5, 6], 10, tables[1:3], parents=(-1, -1)),
        RowInput([7], 4, tables[3:4]),
    ]
    whole = build_step_input(rows, 16, torch.device("cpu"))
    part, at = part_of(whole, np.array([False, True, True]))
    expected = build_step_input(rows[1:], 16, torch.device("cpu"))
    assert at.tolist() == [3, 4, 5, 6]
    for name in ("token_ids", "positions", "slots"):
        assert torch.equal(getattr(part, name), getattr(expected, name))
    for name in ("query_start_np", "context_len_np", "is_tree_np", "ancestors_np"):
        assert np.array_equal(getattr(part.attention, name), getattr(expected.attention, name)), name
