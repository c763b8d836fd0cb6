"""`alignedserve completion`: what a shell completes as one types, by the parsers of the commands themselves.

A script asks `alignedserve completion words -- WORD...` what may stand in the place of the last word. Where
that is nothing, the shell completes names of files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_WORDS = "words"
_SCRIPTS = {
    "bash": """_alignedserve() {
  local found=$("${COMP_WORDS[0]}" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f1)
  COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _alignedserve alignedserve
""",
    "zsh": """#compdef alignedserve
_alignedserve() {
  local found=(${(f)"$($words[1] completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null | cut -f1)"})
  [[ -n $found ]] && compadd -- $found || _files
}
compdef _alignedserve alignedserve
""",
    "fish": """function __alignedserve_words
    set -l typed (commandline -opc) (commandline -ct)
    $typed[1] completion words -- $typed[2..] 2>/dev/null
end
complete -c alignedserve -a '(__alignedserve_words)'
""",
}


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Prints a script for a shell, to be read in the file that it reads at its start. bash and zsh: eval
    "$(alignedserve completion bash)"; fish: alignedserve completion fish | source."""
    parser.add_argument("shell", choices=[*_SCRIPTS, _WORDS], metavar="|".join(_SCRIPTS))
    parser.add_argument("typed", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_print)


def _print(args: argparse.Namespace) -> int:
    if args.shell != _WORDS:
        print(_SCRIPTS[args.shell], end="")
        return 0
    for word, about in _words(args.typed or [""]).items():
        print(word, about, sep="\t")
    return 0


def _words(typed: Sequence[str]) -> dict[str, str]:
    """Return the words that may stand in the place of the last one, and what each is for."""
    from alignedserve.cli.main import parser_of

    *before, last = typed
    parser, below = parser_of(*before[:1]), dict[str, argparse.ArgumentParser]()
    for word in ["", *before]:
        parser, found, below = below.get(word, parser), dict[str, str](), {}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                below = dict(action.choices)
                found = {choice.dest: choice.help or "" for choice in action._choices_actions}
            elif not action.option_strings:
                found |= dict.fromkeys(_values(action), "")
    flags = parser._option_string_actions
    if before and before[-1] in flags and (values := _values(flags[before[-1]])):
        return dict.fromkeys(values, "")
    return {flag: _first(action.help) for flag, action in flags.items()} if last.startswith("-") else found


def _values(action: argparse.Action) -> list[str]:
    """Return the values of an argument that are known, also by a placeholder such as on|off."""
    named = str(action.metavar or "")
    return named.split("|") if "|" in named else [*map(str, action.choices or ())]


def _first(about: str | None) -> str:
    """Return what a help text says first, as a shell shows it in a line."""
    said = "" if about in (None, argparse.SUPPRESS) else str(about)
    return said.partition("; ")[0].partition(" (default")[0].replace("%%", "%")[:80]
