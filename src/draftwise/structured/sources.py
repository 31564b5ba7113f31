"""From what is wanted of an output to the text of a grammar as llguidance reads it."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from draftwise.errors import RequestError
from draftwise.sampling.structured import StructuredOutputs

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""A run of optional whitespace in JSON, unless the request says otherwise."""

_LONGEST_RUN = 4096
"""Characters that may be forced in a row. The library goes through all of them at once, a microsecond each."""
_LARGE = 16_384
"""Characters of a grammar that might force as many."""

_STRING = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')
_ESCAPED = re.compile(r"\\+u([0-9a-fA-F]{4})")
_MOST_REMAINDERS = 65_536
"""The library's automaton has a state for each remainder: 65,536 take a second and 40 MB. Of more it makes states for
minutes, and nothing of its own ends that."""
_LARK = re.compile(
    r"""
    (?P<other> "(?:[^"\\\n]|\\.)*" | /(?![/*])(?:[^/\\\n]|\\.)+/ | //[^\n]* | \#[^\n]* )  # texts, regexes, comments
    | (?P<repeat> ~\s*[0-9] )  # "a" ~ 1..3
    | (?P<operator> [&~] )
    """,
    re.VERBOSE,
)
_NO_FORCING = '%llguidance {"no_forcing":true}\n'


def source_of(spec: StructuredOutputs, library: Any) -> str:
    """The grammar of a request; ``library``: the module llguidance. Raises ValueError.

    A grammar in which a long run of characters could be forced forces nothing: it has the same texts, but every
    division of them into tokens is allowed, and nothing is drafted for free.
    """
    forces = may_force(spec)
    head = "" if forces else _NO_FORCING
    if spec.kind == "json":
        options: dict[str, Any] = {"whitespace_flexible": not spec.disable_any_whitespace}
        if not spec.disable_any_whitespace:
            options["whitespace_pattern"] = spec.whitespace_pattern or _WHITESPACE
        source: str = library.LLMatcher.grammar_from_json_schema(spec.schema, overrides=options)
        if forces:
            return source
        schema = json.dumps(json.loads(source)["grammars"][0]["json_schema"])
        lark = f"{head}start: %json {schema}\n"
    elif spec.kind == "regex":
        assert spec.regex is not None
        # \d means 0-9 to parsers of the answer, not every digit of Unicode
        regex = library.regex_to_lark(without_anchors(spec.regex), "d")
        lark = f"{head}start: /{regex}/"
    elif spec.kind == "choice":
        assert spec.choice is not None
        # One terminal: the library makes a trie of it. As alternatives of a rule each would be a terminal by itself,
        # and of those the parser keeps two thousand at most.
        lark = f"{head}start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, spec.choice))}\n"
    else:
        assert spec.grammar is not None
        source = library.grammar_from("grammar", spec.grammar)
        lark = json.loads(source)["grammars"][0]["lark_grammar"] if source.startswith("{") else source
        _refuse_products(lark)
        if forces:
            return source
        lark = head + lark
    return str(library.LLMatcher.grammar_from_lark(lark))


def _refuse_products(lark: str) -> None:
    """Raises RequestError for a Lark grammar with an intersection (``&``) or a complement (``~``) of regexes.

    Their automata are products, and those of a few short regexes have more states than memory holds: the library makes
    them for minutes, and none of its limits ends that. Example: ``/(a{97})*/ & /(a{89})*/ & /(a{83})*/`` has 716,539.
    """
    for found in _LARK.finditer(lark):
        if found["operator"]:
            raise RequestError(
                f"structured_outputs: grammar: {found['operator']!r} is not supported: an intersection (&) or a "
                "complement (~) of a few short regexes can take more time and memory to compile than there is"
            )


def num_remainders(spec: StructuredOutputs) -> int:
    """How many remainders an automaton for all ``multipleOf`` of a grammar tells apart: their least common multiple,
    where a factor of ten is none; 1: there are none. Example: of 0.25 and 60 it has to know 25 and 6, together 150.

    Raises RequestError for more than can be followed.
    """
    if spec.kind == "json":
        text = spec.schema
    elif spec.grammar is not None:  # in which schemas may stand, also as texts of texts
        text = _ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), spec.grammar).replace("\\", "")
    else:
        return 1
    together = 1
    for number in _MULTIPLE.findall(text):
        try:
            digits = "".join(map(str, Decimal(number).as_tuple().digits)).strip("0")
        except InvalidOperation:
            continue  # no number: the library says so
        if len(digits) < 10:
            together = math.lcm(together, int(digits or "1"))
        if len(digits) >= 10 or together > _MOST_REMAINDERS:
            raise RequestError(
                f"structured_outputs: multipleOf {number[:40]} has too many remainders to be followed: all of them "
                f"together (their least common multiple, without zeros at its end) at most {_MOST_REMAINDERS}"
            )
    return together


def may_force(spec: StructuredOutputs) -> bool:
    """Whether runs of forced characters are certainly short: there are no long literals, no large repetitions, and
    there is not much text altogether, unless optional whitespace cuts it into pieces."""
    if spec.kind == "choice":
        return max(map(len, spec.choice or ())) <= _LONGEST_RUN
    text = spec.schema if spec.kind == "json" else spec.regex or spec.grammar or ""
    cut = spec.kind == "json" and not spec.disable_any_whitespace
    if len(text) > _LARGE and not cut:
        return False
    if spec.kind == "regex" and len(text) > _LONGEST_RUN:
        return False
    pieces = [text] if spec.kind == "regex" else [match[1] for match in _STRING.finditer(text)]
    if any(len(piece) > _LONGEST_RUN for piece in pieces):
        return False
    return all(_repeated(piece) <= _LONGEST_RUN for piece in (pieces if spec.kind == "json" else [text]))


def _repeated(text: str) -> int:
    """How often the counts of a pattern may repeat something: their product, as if each stood in the one before.

    Example: "(a{3}b){2,5}" has 15."""
    product = 1
    for low, high in _COUNT.findall(text):
        product *= max(1, int((high or low or "1")[:9]))
        if product > _LONGEST_RUN:
            break
    return product


def without_anchors(regex: str) -> str:
    """A regex is matched against the whole text, so that ^ at its start and $ at its end say nothing new."""
    regex = regex.removeprefix("^")
    if regex.endswith("$"):
        before = regex[:-1]
        escaped = (len(before) - len(before.rstrip("\\"))) % 2 == 1
        regex = regex if escaped else before
    return regex
