"""``draftwise completions SHELL``: a script for bash, zsh or fish, made from the parsers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers

_BASH = """\
# draftwise completions bash >> ~/.bashrc
_draftwise() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" options=""
    if [[ $COMP_CWORD -eq 1 ]]; then options="{commands}"; else
        case "$command" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$options" -- "$word"))
    [[ ${{#COMPREPLY[@]}} -gt 0 || "$word" == -* ]] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _draftwise draftwise
"""


def add_parser(subparsers: Subparsers) -> None:
    """Register ``completions``."""
    parser = subparsers.add_parser(
        "completions",
        help="a script that completes commands and options in your shell",
        usage="draftwise completions {bash,zsh,fish}",
        description="Print a script for your shell. bash: draftwise completions bash >> ~/.bashrc; zsh: the same with "
        "~/.zshrc; fish: draftwise completions fish > ~/.config/fish/completions/draftwise.fish",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise completions``."""
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """The script. zsh runs bash's by its own ``bashcompinit``."""
    from draftwise.cli.main import COMMANDS

    words = {command: words_of(command) for command in COMMANDS}
    if shell == "fish":
        lines = ["# draftwise completions fish > ~/.config/fish/completions/draftwise.fish"]
        for command, text in COMMANDS.items():
            lines.append(f"complete -c draftwise -n __fish_use_subcommand -a {command} -d '{_quoted(text)}'")
            for word in words[command]:
                kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
                lines.append(f"complete -c draftwise -n '__fish_seen_subcommand_from {command}' {kind}")
        return "\n".join(lines) + "\n"
    cases = "\n".join(
        f'            {command}) options="{" ".join(found)}" ;;' for command, found in words.items()
    )
    made = _BASH.format(commands=" ".join(COMMANDS), cases=cases)
    return "autoload -U +X bashcompinit && bashcompinit\n" + made if shell == "zsh" else made


def words_of(command: str) -> list[str]:
    """Flags of a command, and of its kinds, whose names come first."""
    from draftwise.cli.main import build_parser

    top = next(a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    parsers: list[argparse.ArgumentParser] = [top.choices[command]]
    names: list[str] = []
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            names += action.choices
            parsers += action.choices.values()
    actions = [a for p in parsers for a in p._actions if a.help != argparse.SUPPRESS]
    flags = [flag for a in actions for flag in a.option_strings if flag.startswith("--")]
    return list(dict.fromkeys([*names, *flags]))


def _quoted(text: str) -> str:
    return text.replace("'", "\\'")
