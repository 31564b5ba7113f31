"""The embedded models: text in, text out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from draftwise import LLM, AsyncLLM, RequestError, SamplingParams

PROMPT = "import os\n\ndef read_file(path):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with LLM(num_kv_blocks=512, keep_trace=True, speculation_control="static") as engine:
        yield engine
        engine.check_integrity()
        assert engine.stats().num_used_blocks == 0
    torch.set_num_threads(before)


def test_first_use(llm: LLM) -> None:
    output = llm.generate(PROMPT, GREEDY)[0]
    assert output.prompt == PROMPT
    completion = output.outputs[0]
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
    speculation = output.metrics.speculation
    assert speculation.steps_by_method["mtp"] > 0
    assert speculation.mean_acceptance_length is not None and speculation.mean_acceptance_length > 1
    assert speculation.num_accepted_tokens == sum(speculation.num_accepted_tokens_per_pos)
    assert output.metrics.ttft is not None and output.metrics.itl is not None
    # The trace tells the whole story of the output.
    assert completion.trace is not None
    told = [token for step in completion.trace for token in step.token_ids]
    assert tuple(told) == completion.token_ids
    for step in completion.trace:
        assert [step.draft_tokens[i] for i in step.accepted_nodes] == list(step.token_ids[:-1])


def test_methods_agree(llm: LLM) -> None:
    texts = {
        method: llm.generate(PROMPT, GREEDY.replace(speculation={"method": method}))[0].outputs[0].text
        for method in ("none", "ngram", "mtp", "draft_model")
    }
    assert len(set(texts.values())) == 1


def test_stop_strings_cut_inside_accepted_drafts(llm: LLM) -> None:
    free = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 4]
    where = free.text.index(stop)
    for method in ("none", "ngram", "mtp", "draft_model"):
        for include in (False, True):
            params = GREEDY.replace(
                stop=["never this", stop],
                include_stop_str_in_output=include,
                speculation={"method": method, "num_speculative_tokens": 6},
            )
            completion = llm.generate(PROMPT, params)[0].outputs[0]
            assert completion.text == free.text[: where + (len(stop) if include else 0)]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
            assert stop in llm.get_tokenizer().decode(completion.token_ids)


def test_stop_strings_need_text(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stop: stop strings need detokenize=True"):
        llm.generate(PROMPT, GREEDY.replace(stop=["x"], detokenize=False))
    plain = llm.generate(PROMPT, GREEDY.replace(detokenize=False))[0].outputs[0]
    assert plain.text == "" and len(plain.token_ids) == 48


def test_samples_share_one_automaton_of_stop_strings(llm: LLM) -> None:
    assert llm._engine is not None
    params = GREEDY.replace(n=32, stop=["x" * 10_000, "y"])
    group = llm._engine.processor.group(PROMPT, params)
    stops = {id(request.sink._stops) for request in group.requests if request.sink is not None}  # type: ignore[attr-defined]
    assert len(group.requests) == 32 and len(stops) == 1


def test_bad_words_never_appear(llm: LLM) -> None:
    free = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    word = max(free.split(), key=len)
    for method in ("none", "draft_model"):
        params = GREEDY.replace(bad_words=[word], speculation={"method": method})
        text = llm.generate(PROMPT, params)[0].outputs[0].text
        assert f" {word} " not in f" {text} "


def test_samples_and_logprobs_have_text(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=1, logprobs=2)
    outputs = llm.generate(PROMPT, params)[0].outputs
    assert len({o.text for o in outputs}) == 3
    for completion in outputs:
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
            assert 2 <= len(entry) <= 3
        total = sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total)


def test_chat_on_a_base_model_says_what_to_do(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with monkeypatch.context() as patch:
        patch.setattr(llm.get_tokenizer(), "chat_template", None)
        with pytest.raises(
            RequestError, match=r"no chat template .* use generate.*/v1/completions.*--chat-template"
        ):
            llm.chat(messages)
    assert llm.chat(messages, GREEDY.replace(max_tokens=4))[0].prompt == "hello"
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    output = llm.chat(messages, GREEDY.replace(max_tokens=4), chat_template=template)[0]
    assert output.prompt == "# user: hello\n"
    for form in ("auto", "string"):  # vLLM's
        answered = llm.chat(messages, GREEDY.replace(max_tokens=4), chat_template_content_format=form)
        assert answered[0].prompt == "hello"
    with pytest.raises(RequestError, match=r"chat_template_content_format is 'openai'; .* contents as text"):
        llm.chat(messages, chat_template_content_format="openai")
    with pytest.raises(RequestError, match="'role'"):
        llm.chat([{"content": "hello"}], chat_template=template)
    with pytest.raises(RequestError, match="not valid Jinja"):
        llm.chat(messages, chat_template="{% if %}")
    with pytest.raises(RequestError, match="chat template refused"):
        llm.chat(messages, chat_template="{{ raise_exception('no') }}")


def test_empty_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate("")


def test_streamed_text_is_the_text() -> None:
    async def main() -> None:
        async with AsyncLLM(num_kv_blocks=256, speculation_control="static") as llm:
            full = ""
            async for output in llm.generate(PROMPT, GREEDY):
                full = output.outputs[0].text
            pieces = []
            async for output in llm.generate(PROMPT, GREEDY.replace(output_kind="delta")):
                pieces.append(output.outputs[0].text)
            assert "".join(pieces) == full
            # Several tokens per step: fewer pieces than tokens.
            assert len(pieces) < 48

    asyncio.run(main())
