"""Incremental text equals text in one go; stop strings cut at the same character however tokens fall."""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from draftwise.engine import detokenizer as module
from draftwise.engine.detokenizer import IncrementalDetokenizer, StopMatch, byte_of_char, bytes_of_token
from draftwise.engine.stops import StopStrings

SAMPLES = [
    "def naïve(self):\n\treturn 'ascii'\n",
    "Grüße, señor — “quotes” … ¿qué?\n",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and combining e\u0301a\u0308 ไทย हिन्दी 漢字かな\n",
    "tabs\t\tand  spaces   and\r\nreturns\u00a0\u2028",
]


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("→漢", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|im end|>", special=True)])
    return tokenizer


@cache
def sentencepiece_like() -> Tokenizer:
    """Llama-2's kind: spaces are part of tokens, unknown characters are spelled in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "▁the", "▁a", "ing", "th"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


class Letters:
    """A tokenizer whose tokens are given strings: what stop strings see is text, not tokens."""

    decoder = None

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.pieces[i] for i in ids)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {}


def run(pieces: list[str], **options: object) -> tuple[IncrementalDetokenizer, list[str], StopMatch | None]:
    """Push pieces until one completes a stop string, and finish: (detokenizer, deltas, match)."""
    stop = options.pop("stop", ())
    stops = StopStrings(stop) if stop else None  # type: ignore[arg-type]
    detokenizer = IncrementalDetokenizer(Letters(pieces), stop=stops, **options)  # type: ignore[arg-type]
    deltas = []
    for i in range(len(pieces)):
        match = detokenizer.push(i)
        deltas.append(detokenizer.delta())
        if match:
            detokenizer.finish()
            return detokenizer, deltas, match
    detokenizer.finish()
    deltas.append(detokenizer.delta())
    return detokenizer, deltas, None


# -------------------------------------------------------------------------------------------- text in one go


@given(st.data(), st.booleans())
def test_any_tokens_of_a_byte_level_tokenizer(data: st.DataObject, skip: bool) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 2), max_size=40))  # some do not exist
    detokenizer = IncrementalDetokenizer(tokenizer, [5, 6], skip_special_tokens=skip)
    shown = ""
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    for token in ids:
        assert detokenizer.push(token) is None
        shown += detokenizer.delta()
        assert detokenizer.text == shown and expected.startswith(shown)
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == shown + detokenizer.delta() == expected


@pytest.mark.parametrize("skip", [True, False])
def test_bytes_of_every_token_are_what_the_tokenizer_decodes(skip: bool) -> None:
    tokenizer = byte_level()
    for token in range(tokenizer.get_vocab_size()):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        detokenizer.push(token)
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode([token], skip_special_tokens=skip)


def test_the_alphabet_is_the_tokenizers_library_s() -> None:
    assert set(byte_of_char()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of_char().values()) == list(range(256))
    assert byte_of_char()["Ġ"] == 0x20 and byte_of_char()["Ċ"] == 0x0A


@given(st.text(max_size=30))
def test_no_character_is_ever_split(text: str) -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        detokenizer.push(token)
        assert text.startswith(detokenizer.text)
    assert detokenizer.text == text


def test_half_a_character_is_held_back_and_shown_as_such_only_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("𝄞").ids
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in ids[:-1]:
        detokenizer.push(token)
    assert detokenizer.text == ""
    detokenizer.finish()
    assert detokenizer.text == "\ufffd"


@given(st.text("abcdefgh .,eé漢😀", max_size=30), st.text("abc é😀", max_size=12))
def test_sentencepiece_text_goes_on_from_the_prompt(text: str, prompt: str) -> None:
    tokenizer = sentencepiece_like()
    before = tokenizer.encode(prompt, add_special_tokens=False).ids
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(tokenizer, before)
    for token in ids:
        detokenizer.push(token)
        assert "\ufffd" not in detokenizer.text
    detokenizer.finish()
    whole, lead = tokenizer.decode(before + ids), tokenizer.decode(before)
    assert whole == lead + detokenizer.text


def test_a_prompt_that_ends_inside_a_character_is_no_context() -> None:
    tokenizer = sentencepiece_like()
    half = tokenizer.token_to_id("<0xE6>")
    the = tokenizer.token_to_id("▁the")
    detokenizer = IncrementalDetokenizer(tokenizer, [the, half])
    detokenizer.push(the)
    assert detokenizer.text == "the"


def test_malformed_bytes_do_not_hold_text_back_for_ever() -> None:
    tokenizer = sentencepiece_like()
    half = tokenizer.token_to_id("<0xE6>")
    detokenizer = IncrementalDetokenizer(tokenizer)
    for _ in range(600):
        detokenizer.push(half)
    assert len(detokenizer.text) > 590
    detokenizer.finish()
    assert set(detokenizer.text) == {"\ufffd"}


def test_special_tokens_between_words() -> None:
    tokenizer = sentencepiece_like()
    the, end = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("</s>")
    for skip, expected in ((True, "the the"), (False, "the</s> the")):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        for token in (the, end, end, the) if skip else (the, end, the):
            detokenizer.push(token)
        detokenizer.finish()
        assert detokenizer.text == expected


def test_with_the_embedded_tokenizer() -> None:
    path = Path(module.__file__).parents[1] / "assets" / "demo" / "target" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    rng = np.random.default_rng(0)
    sequences = [tokenizer.encode(text).ids for text in SAMPLES]
    sequences += [rng.integers(0, tokenizer.get_vocab_size(), 500).tolist() for _ in range(20)]
    for ids in sequences:
        detokenizer = IncrementalDetokenizer(tokenizer)
        for token in ids:
            detokenizer.push(token)
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode(ids)


def test_a_transformers_tokenizer_is_the_same_thing() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    ids = tokenizer.encode("".join(SAMPLES))
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in ids:
        detokenizer.push(token)
    assert detokenizer.text == tokenizer.decode(ids) == "".join(SAMPLES)


# ---------------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("pieces", "options", "deltas", "stop"),
    [
        (["a", " E", "N", "x"], {"stop": ("END",)}, ["a", " ", "", "ENx", ""], None),
        (["a", " E", "N", "D"], {"stop": ("END",)}, ["a", " ", "", ""], "END"),
        (["a E", "NDx"], {"stop": ("END",)}, ["a ", ""], "END"),
        (
            ["a E", "NDx"],
            {"stop": ("END",), "include_stop_str_in_output": True},
            ["a E", "ND"],
            "END",
        ),
        (["aENDbEND"], {"stop": ("END",)}, ["a"], "END"),
        (["ab", "E"], {"stop": ("END",)}, ["ab", "", "E"], None),
        (["x", "\n", "\n", "y"], {"stop": ("\n\n",)}, ["x", "", ""], "\n\n"),
        (["aaab"], {"stop": ("aab",)}, ["a"], "aab"),
        (["a", "a", "a", "b"], {"stop": ("aab",)}, ["", "", "a", ""], "aab"),
        (["xabc"], {"stop": ("b", "abc")}, ["xa"], "b"),  # the first one that is complete
        (["xabc"], {"stop": ("bc", "abc")}, ["x"], "abc"),  # both at once: the longer one
        (["xabc"], {"stop": ("abc", "bc")}, ["x"], "abc"),
        (["x", "a", "b"], {"stop": ("x",)}, [""], "x"),
    ],
)
def test_stop_strings(
    pieces: list[str], options: dict[str, object], deltas: list[str], stop: str | None
) -> None:
    detokenizer, got, match = run(pieces, **options)
    assert got == deltas
    assert (match.stop if match else None) == stop
    assert detokenizer.text == "".join(deltas)
    assert detokenizer.stopped == (stop is not None)


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [
        (0, "", "ab"),
        (1, "", "ab"),
        (2, "abc", "ab"),  # the second token completes it: too early
        (3, "abc", "ab"),
        (4, "abcabc", "ab"),
        (5, "abcabcab", None),
    ],
)
def test_stop_strings_complete_within_min_tokens_do_not_count(
    min_tokens: int, text: str, stop: str | None
) -> None:
    detokenizer, _, match = run(["a", "b", "ca", "bc", "ab"], stop=("ab",), min_tokens=min_tokens)
    assert (detokenizer.text, match.stop if match else None) == (text, stop)


def oracle(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int | None]:
    """(text, stop, token that completed it), looking at one character after the other."""
    seen = ""
    for i, piece in enumerate(pieces):
        for char in piece:
            seen += char
            ended = [s for s in stops if seen.endswith(s)]
            if ended and i + 1 > min_tokens:
                stop = max(ended, key=len)
                return seen if include else seen[: -len(stop)], stop, i
    return seen, None, None


@given(
    st.lists(st.text("ab", min_size=0, max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
@settings(max_examples=500)
def test_stop_strings_against_an_oracle(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    text, stop, at = oracle(pieces, stops, include, min_tokens)
    detokenizer, deltas, match = run(
        pieces, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    assert (detokenizer.text, match.stop if match else None) == (text, stop)
    assert "".join(deltas) == text, "what was streamed was never taken back"
    if at is not None:
        assert len(deltas) == at + 1


def test_a_stop_string_across_tokens_of_a_real_tokenizer() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("return é😀 done").ids
    detokenizer = IncrementalDetokenizer(tokenizer, stop=StopStrings(["é😀"]))
    matches = []
    for token in ids:
        matches.append(detokenizer.push(token))
        if matches[-1]:
            break
    assert matches[-1] == StopMatch("é😀") and not any(matches[:-1])
    assert detokenizer.text == "return "
    detokenizer.finish()
    assert detokenizer.text == "return "


def with_token(token: str) -> Tokenizer:
    """A tokenizer with one more token, in the alphabet of byte-level ones."""
    tokenizer: Tokenizer = byte_level.__wrapped__()
    tokenizer.add_tokens([token])
    return tokenizer


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_whose_last_token_begins_a_character(include: bool) -> None:
    """The token "D" + the first byte of a character completes the stop string: the half character is cut, too."""
    tokenizer = with_token("Dæ")  # the alphabet's æ is the byte 0xE6, with which "漢" begins
    detokenizer = IncrementalDetokenizer(
        tokenizer, stop=StopStrings(["END"]), include_stop_str_in_output=include
    )
    assert [detokenizer.push(tokenizer.token_to_id(char)) for char in "aEN"] == [None] * 3
    assert detokenizer.push(tokenizer.token_to_id("Dæ")) == StopMatch("END")
    detokenizer.finish()
    assert detokenizer.text == detokenizer.delta() == ("aEND" if include else "a")


def test_a_character_begun_inside_a_stop_string_is_whole_when_that_goes_on_otherwise() -> None:
    tokenizer = with_token("Næ")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=StopStrings(["END", "漢!"]))
    deltas = []
    for token in ("E", "Næ", "¼", "¢", "x"):  # "EN", and the bytes 0xE6 0xBC 0xA2 of "漢"
        assert detokenizer.push(tokenizer.token_to_id(token)) is None
        deltas.append(detokenizer.delta())
    assert deltas == ["", "", "", "EN", "漢x"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("text", ["1 € 2", "😀", "1 \ufffd 2"])
def test_the_replacement_character_stops_where_it_is_the_text(
    make: Callable[[], Tokenizer], text: str
) -> None:
    """What is half a character for a moment is none yet."""
    tokenizer = make()
    ids = tokenizer.encode(text).ids
    found = IncrementalDetokenizer(tokenizer, stop=StopStrings(["\ufffd"]))
    match = next(filter(None, map(found.push, ids)), None)
    assert match == (StopMatch("\ufffd") if "\ufffd" in text else None)
    cut = IncrementalDetokenizer(tokenizer, stop=StopStrings(["\ufffd"]))
    assert not any(map(cut.push, tokenizer.encode("1 €").ids[:-1]))
    cut.finish()
    assert not cut.stopped and cut.text.endswith("\ufffd")


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = IncrementalDetokenizer(Letters(["ab", "c"]), stop=StopStrings(["b"]))
    assert detokenizer.push(0) == StopMatch("b")
    with pytest.raises(AssertionError):
        detokenizer.push(1)


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    for tokenizer in (byte_level(), sentencepiece_like()):
        ids = tokenizer.encode("a thing. " * 4).ids
        detokenizer = IncrementalDetokenizer(tokenizer, stop=StopStrings(["zzz"]))

        def median(detokenizer: IncrementalDetokenizer = detokenizer, ids: list[int] = ids) -> float:
            times = []
            for token in (ids * 40)[:400]:
                start = time.perf_counter()
                detokenizer.push(token)
                times.append(time.perf_counter() - start)
            return float(np.median(times))

        early = median()
        for token in ids * 600:
            detokenizer.push(token)
        assert median() < 4 * early


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_bytes_of_tokens_are_those_of_the_text(make: Callable[[], Tokenizer]) -> None:
    """Also of tokens that are a part of a character."""
    tokenizer = make()
    for text in (*SAMPLES, "the 😀 漢"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(bytes_of_token(tokenizer, i) for i in ids)
        if make is byte_level:
            assert joined.decode() == text
        else:
            spelled = [i for i in ids if 3 <= i < 259]  # of the others, spaces depend on what stands before
            assert b"".join(bytes_of_token(tokenizer, i) for i in spelled) == bytes(i - 3 for i in spelled)
    end = tokenizer.token_to_id("<|end|>" if make is byte_level else "</s>")
    assert bytes_of_token(tokenizer, end) == (b"<|end|>" if make is byte_level else b"</s>")
