"""``draftwise tokenize``: token ids of texts, and texts of token ids, without loading a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from draftwise.cli.errors import UsageError
from draftwise.cli.inputs import read_stdin
from draftwise.cli.numbers import boolean
from draftwise.cli.report import print_json

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers

BOOLEANS = ("trust-remote-code", "add-special-tokens")


def add_parser(subparsers: Subparsers) -> None:
    """Register ``tokenize``."""
    parser = subparsers.add_parser(
        "tokenize",
        help="token ids of texts, and texts of token ids",
        usage="draftwise tokenize [options] TEXT ...\n       draftwise tokenize [options] --decode ID ...",
        description="Show the tokens of a text with their ids, or the text of token ids. Only the tokenizer is loaded.",
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text; - reads one from stdin")
    parser.add_argument("--decode", nargs="+", type=int, metavar="ID", help="token ids to make a text of")
    parser.add_argument(
        "--model", "-m", metavar="MODEL", help="folder, GGUF file or hub id (the embedded model)"
    )
    parser.add_argument("--revision", metavar="REVISION", help="revision on the hub")
    parser.add_argument(
        "--trust-remote-code", type=boolean, default=False, metavar="BOOL", help="run a tokenizer's own code"
    )
    parser.add_argument(
        "--add-special-tokens",
        type=boolean,
        default=True,
        metavar="BOOL",
        help="as a prompt has them (true)",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object per text on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise tokenize``."""
    if bool(args.texts) == (args.decode is not None):
        raise UsageError("tokenize: give texts, or --decode with token ids")
    from draftwise.config.embedded import embedded_path
    from draftwise.encoding import encode_text
    from draftwise.models.tokenizer import load_tokenizer

    model = args.model if args.model is not None else str(embedded_path("target"))
    tokenizer = load_tokenizer(model, revision=args.revision, trust_remote_code=args.trust_remote_code)
    if args.decode is not None:
        _decode(tokenizer, args.decode, as_json=args.json)
        return 0
    for text in args.texts:
        text = read_stdin() if text == "-" else text
        ids = encode_text(tokenizer, text, "tokenize", args.add_special_tokens)
        if args.json:
            print_json({"text": text, "token_ids": ids, "count": len(ids)})
            continue
        for token in ids:
            print(f"{token:>7}  {tokenizer.decode([token])!r}")
        print(f"{len(ids)} tokens, {len(text)} characters")
    return 0


def _decode(tokenizer: Any, ids: list[int], *, as_json: bool) -> None:
    for token in ids:
        if not 0 <= token < len(tokenizer):
            raise UsageError(
                f"--decode: {token} is not a token of this tokenizer (0 to {len(tokenizer) - 1})"
            )
    text = tokenizer.decode(ids)
    if as_json:
        print_json({"text": text, "token_ids": ids, "count": len(ids)})
    else:
        print(text)
