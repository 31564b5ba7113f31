"""The text of ``--help``: a command's own options, and a line for each large group until the group is asked for.

``--help``: the short form; ``--help=GROUP``: one group; ``--help=all``: everything; ``--help=WORD``: options that have
the word in their name or text.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence

from draftwise.cli.errors import UsageError
from draftwise.cli.tables import WIDTH

LARGE = 12
"""A group of more options than this is one line in the short form, unless nothing else is left to show."""
_SHOWN = 5


def wanted(arguments: Sequence[str]) -> str | None:
    """The help that the arguments ask for: "" is the short form, None is no help.

    >>> wanted(["generate", "--help=engine"]), wanted(["-h"]), wanted(["generate", "--", "--help"])
    ('engine', '', None)
    """
    for argument in arguments:
        if argument == "--":
            return None
        if argument in ("-h", "--help"):
            return ""
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def innermost(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the subcommand that the arguments name: of "bench latency" that of latency."""
    for argument in arguments:
        choices = next(
            (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None
        )
        if choices is None:
            break
        parser = choices.get(argument, parser)
    return parser


def help_text(parser: argparse.ArgumentParser, what: str) -> str:
    """The text. Raises UsageError if there is neither a group nor an option of that name."""
    groups = [(g, _visible(g._group_actions)) for g in parser._action_groups]
    groups = [(g, actions) for g, actions in groups if actions]
    if what == "all":
        return _format(parser, groups, fold=False)
    if not what:
        return _format(parser, groups, fold=True)
    word = what.lower().replace("_", "-")
    named = [(g, actions) for g, actions in groups if _name(g).startswith(word)]
    if named:
        return _format(parser, named, fold=False, intro=False)
    found = [(g, [a for a in actions if _mentions(a, word)]) for g, actions in groups]
    found = [(g, actions) for g, actions in found if actions]
    if not found:
        names = ", ".join(_name(g) for g, _ in groups)
        raise UsageError(f"--help={what}: no group and no option of this name (groups: {names}, all)")
    return _format(parser, found, fold=False, intro=False)


def _visible(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [a for a in actions if a.help != argparse.SUPPRESS]


def _name(group: argparse._ArgumentGroup) -> str:
    return (group.title or "").split(" (")[0].lower()


def _mentions(action: argparse.Action, word: str) -> bool:
    return any(word in flag for flag in action.option_strings) or word in (action.help or "").lower()


def _usage(parser: argparse.ArgumentParser) -> str:
    """Of a command that gives none: its name, what it wants beside options, and "[options]"."""
    words = [parser.prog]
    for action in parser._actions:
        if not action.option_strings:
            name = str(action.metavar or action.dest)
            words.append(f"[{name}]" if action.nargs in ("?", "*") else name)
    return " ".join([*words, "[options]"])


def _own_group(
    groups: Sequence[tuple[argparse._ArgumentGroup, list[argparse.Action]]],
) -> argparse._ArgumentGroup | None:
    """The large group that the short form shows, too: the first, if no option but --help would be seen without it."""
    small = [a for _, actions in groups if len(actions) <= LARGE for a in actions]
    if any(a.option_strings and not isinstance(a, argparse._HelpAction) for a in small):
        return None
    return next((group for group, actions in groups if len(actions) > LARGE), None)


def _format(
    parser: argparse.ArgumentParser,
    groups: Sequence[tuple[argparse._ArgumentGroup, list[argparse.Action]]],
    *,
    fold: bool,
    intro: bool = True,
) -> str:
    formatter = parser._get_formatter()
    if intro:
        formatter.add_usage(parser.usage or _usage(parser), [], [])
        text = parser.description or ""
        formatter.add_text(text if "\n" in text else textwrap.fill(text, WIDTH - 2))
    folded: list[str] = []
    kept = _own_group(groups)
    for group, actions in groups:
        if fold and len(actions) > LARGE and group is not kept:
            flags = [
                next(f for f in a.option_strings if f.startswith("--")) for a in actions if a.option_strings
            ]
            line = f"{_name(group)}: {', '.join(flags[:_SHOWN])} and {len(flags) - _SHOWN} more (--help={_name(group)})"
            folded += textwrap.wrap(line, WIDTH - 2, initial_indent="  ", subsequent_indent="    ",
                                    break_on_hyphens=False)  # fmt: skip
            continue
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(actions)
        formatter.end_section()
    made = formatter.format_help()
    if folded:
        made += "\nmore options:\n" + "\n".join(folded) + "\n"
    if fold and folded:
        made += "\n--help=all shows everything, --help=WORD the options that have the word in them.\n"
    if intro and parser.epilog:
        made += "\n" + parser.epilog.rstrip() + "\n"
    return made
