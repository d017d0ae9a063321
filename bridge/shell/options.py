"""Options of `set` and `shopt`: those that are supported or change no run, and those that are not supported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LETTERS: Mapping[str, str] = {
    "a": "allexport",
    "b": "notify",
    "e": "errexit",
    "f": "noglob",
    "h": "hashall",
    "k": "keyword",
    "m": "monitor",
    "n": "noexec",
    "p": "privileged",
    "t": "onecmd",
    "u": "nounset",
    "v": "verbose",
    "x": "xtrace",
    "B": "braceexpand",
    "C": "noclobber",
    "E": "errtrace",
    "H": "histexpand",
    "P": "physical",
    "T": "functrace",
}
"""Names of shell options by letter, as in `set -e`."""
ON = frozenset(("braceexpand",))
"""Supported options that are on by default. All others are off by default."""
OFF = frozenset(
    (
        "extglob",
        "nullglob",
        "nocasematch",
        "dotglob",
        "globstar",
        "failglob",
        "inherit_errexit",
        "lastpipe",
    )
)
"""Options of `shopt` that are off by default."""
COMPATIBLE = re.compile(r"compat[0-9]+")


@dataclass(frozen=True)
class Options:
    """Options of `set` or `shopt`.

    `taken` are options that are supported, or that change nothing here. `off` are unsupported
    options that are off by default, `on` those that are on by default.
    """

    command: str
    taken: frozenset[str]
    off: frozenset[str]
    on: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Return whether a shell has the option."""
        return name in self.taken | self.off | self.on or bool(COMPATIBLE.fullmatch(name))

    def problem(self, name: str, on: bool) -> str:
        """Return the reason why turning this option on or off is not supported; empty if it is supported."""
        if (
            name in self.taken
            or name in (self.off, self.on)[on]
            or (COMPATIBLE.fullmatch(name) and not on)
        ):
            return ""
        if not self.has(name):
            return f"{self.command} has no option {name}"
        return f"{self.command} turns {name} {'on' if on else 'off'}, which is not supported"


SET = Options(
    "set",
    frozenset(
        (
            *(
                "allexport",
                "braceexpand",
                "errexit",
                "errtrace",
                "noclobber",
                "noexec",
                "noglob",
                "nounset",
                "pipefail",
            ),
            *(
                "emacs",
                "functrace",
                "hashall",
                "history",
                "ignoreeof",
                "interactive-comments",
                "monitor",
                "nolog",
                "notify",
            ),
            *("physical", "privileged", "verbose", "vi", "xtrace"),
        )
    ),
    frozenset(("histexpand", "keyword", "onecmd", "posix")),
)
SHOPT = Options(
    "shopt",
    frozenset(
        (
            *OFF,
            *(
                "autocd",
                "cdspell",
                "checkhash",
                "checkjobs",
                "checkwinsize",
                "cmdhist",
                "complete_fullquote",
                "direxpand",
            ),
            *(
                "dirspell",
                "expand_aliases",
                "force_fignore",
                "globskipdots",
                "gnu_errfmt",
                "histappend",
                "histreedit",
            ),
            *(
                "histverify",
                "hostcomplete",
                "huponexit",
                "interactive_comments",
                "lithist",
                "mailwarn",
                "nocaseglob",
            ),
            *(
                "no_empty_cmd_completion",
                "patsub_replacement",
                "progcomp",
                "progcomp_alias",
                "promptvars",
                "shift_verbose",
            ),
            *("sourcepath", "varredir_close", "xpg_echo"),
        )
    ),
    frozenset(
        (
            *(
                "assoc_expand_once",
                "cdable_vars",
                "execfail",
                "extdebug",
                "localvar_inherit",
                "localvar_unset",
            ),
            "noexpand_translation",
        )
    ),
    frozenset(("extquote", "globasciiranges")),
)
