"""Small launch scripts in which one condition or construct decides a flag, over every operator, quoting and kind of value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bridge.testing.scripts import Script, Writer

SETTINGS = (
    "0",
    "1",
    "",
    "xy",
    "amoe",
    "'x*'",
    "'a b'",
    "-1",
    "07",
    "xy,z",
    "moe",
    "A",
    "-n",
    "'!'",
    "3",
    "12",
)
SIDES = (
    *(
        "$A",
        '"$A"',
        "${B}",
        '"${B}"',
        "$C",
        '"$C"',
        "$UNSET",
        '"$UNSET"',
        '"${UNSET:-}"',
        "1",
        '"1"',
        "0",
        "'xy'",
        "xy",
        '""',
    ),
    *(
        "${#C}",
        "${C:0:1}",
        '"${C:1}"',
        "${C/x/}",
        '"${C%%,*}"',
        "${A:-1}",
        "$((A + 1))",
        '"$A$B"',
        "${C^^}",
        "$(echo $C)",
    ),
)
RULES: Mapping[str, Sequence[str]] = {
    "side": SIDES,
    "quoted side": tuple(f'"{side}"' for side in SIDES if '"' not in side and "'" not in side),
    "wanted": (
        *SIDES,
        "x*",
        '"x*"',
        "*y*",
        '*"moe"*',
        "*moe*",
        "@(xy|z)",
        "!(xy)",
        "[a-x]*",
        "?y",
        "'x*'",
        "*$A*",
        '"$A"*',
        "+(x|y)",
    ),
    "regular": (
        "^x",
        "y$",
        '"^x"',
        "^[0-9]+$",
        "(a|x).*",
        "moe",
        "$C",
        '^"$C"$',
        "^$",
        "[[:digit:]]",
        "x?y",
        "^(-n|-z)$",
    ),
    "number": (
        "A",
        "B",
        "$A",
        "${B}",
        "1",
        "0",
        "(A + 1)",
        "A * B",
        "B % 2",
        "!A",
        "A == 1",
        "B > A",
        "A ? B : 3",
        "UNSET",
        "~B",
    ),
    "same": ("==", "=", "!="),
    "sign": ("-eq", "-ne", "-lt", "-le", "-gt", "-ge"),
    "both": ("&&", "||"),
    "test": (
        *(
            "⟨side⟩ ⟨same⟩ ⟨wanted⟩",
            "⟨side⟩ ⟨same⟩ ⟨wanted⟩",
            "⟨side⟩ =~ ⟨regular⟩",
            "A ⟨sign⟩ B",
            "⟨side⟩ ⟨sign⟩ ⟨side⟩",
        ),
        *(
            "-n ⟨side⟩",
            "-z ⟨side⟩",
            "⟨side⟩",
            "-v A",
            "-v UNSET",
            "! ⟨test⟩",
            "( ⟨test⟩ )",
            "$A < $B",
            '"$B" > 0',
        ),
    ),
    "single": (
        *(
            "⟨quoted side⟩ ⟨same⟩ ⟨quoted side⟩",
            "⟨quoted side⟩ ⟨sign⟩ 1",
            '"$A" ⟨sign⟩ "$B"',
            "-n ⟨quoted side⟩",
        ),
        *("-z ⟨quoted side⟩", "⟨quoted side⟩", "! -n ⟨quoted side⟩"),
    ),
    "joined": ("-a", "-o"),
    "condition": (
        *(
            "[[ ⟨test⟩ ]]",
            "[[ ⟨test⟩ ⟨both⟩ ⟨test⟩ ]]",
            "[[ ⟨test⟩ ⟨both⟩ ⟨test⟩ ⟨both⟩ ⟨test⟩ ]]",
            "[[ ! ( ⟨test⟩ ) ]]",
        ),
        *(
            "[[ (⟨test⟩ ⟨both⟩ ⟨test⟩) ⟨both⟩ ⟨test⟩ ]]",
            "[ ⟨single⟩ ]",
            "[ ⟨single⟩ ⟨joined⟩ ⟨single⟩ ]",
            "test ⟨single⟩",
        ),
        *(
            "test ⟨single⟩ ⟨joined⟩ ⟨single⟩",
            "[ ! ⟨single⟩ ]",
            "[ \\( ⟨single⟩ \\) ⟨joined⟩ ⟨single⟩ ]",
            "[ ⟨side⟩ ]",
        ),
        *(
            "[ ⟨side⟩ ⟨same⟩ ⟨side⟩ ]",
            "(( ⟨number⟩ ))",
            "(( ⟨number⟩ ⟨both⟩ ⟨number⟩ ))",
            "(( (⟨number⟩) ⟨both⟩ !⟨number⟩ ))",
        ),
        *("⟨condition⟩ ⟨both⟩ ⟨condition⟩", "! ⟨condition⟩", "{ ⟨condition⟩; }", "( ⟨condition⟩ )"),
    ),
    "cut": (
        "${S#*=}",
        "${S%%=*}",
        "${S/=/ }",
        "${S//[0-9]/}",
        "${S:3}",
        "${S: -1}",
        "${S:0:$A+1}",
        "${S^^}",
        "${#S}",
        "${S@Q}",
    ),
    "counted": (
        "$((( ⟨number⟩ ) / 2 ))",
        "$((⟨number⟩ << 2))",
        "$(( (⟨number⟩) ** 2 ))",
        "$[⟨number⟩]",
        "$((R[⟨number⟩ & 1]))",
    ),
    "listed": (
        "${P[@]}",
        "${P[*]}",
        "${P[0]}",
        "${P[-1]}",
        "${P[@]:1}",
        "${#P[@]}",
        "${!P[@]}",
        "${P[@]/#/+}",
        "${P[A]}",
        "${M[$C]}",
    ),
    "flag": (
        *(
            "--tp ⟨cut⟩",
            "⟨counted⟩",
            "⟨listed⟩ --x",
            "--x ⟨listed⟩",
            "$A ⟨listed⟩",
            "`echo ⟨listed⟩`",
            "$(f ⟨side⟩)",
            "{a,b} ⟨cut⟩",
        ),
    ),
    "construct": (
        *(
            'X="⟨flag⟩"',
            "X=⟨cut⟩",
            'X=(⟨listed⟩ "⟨listed⟩" ⟨cut⟩); X="${X[@]}"',
            'L="⟨listed⟩ --lr 1"; X="$L"',
        ),
        *(
            "for n in ⟨listed⟩ ⟨cut⟩; do X+=,$n; done",
            'for n in "⟨listed⟩"; do X=$n; done',
            'set -- ⟨listed⟩ "⟨cut⟩"; X="$# $2"',
        ),
        *(
            "case ⟨side⟩ in ⟨wanted⟩) X=one ;; ⟨wanted⟩|1) X=two ;; *) X=three ;; esac",
            "⟨condition⟩ && X=y",
            "⟨condition⟩ || X=n",
        ),
        *(
            "while ((A < 3)); do A=$((A + 1)); X+=$A; done",
            "until [[ ⟨test⟩ ]]; do X+=u; break; done",
            "read X Y <<< ⟨flag⟩",
        ),
        *(
            'X=$(if ⟨condition⟩; then echo "⟨flag⟩"; fi)',
            'g() { local A=${1:-}; X="⟨flag⟩"; }; g ⟨listed⟩',
            "export X=⟨cut⟩ Y=1; X+=$Y",
        ),
        *(
            'X="${Y:-⟨cut⟩}"',
            "X=${Y:+a}${S:+⟨side⟩}",
            "X=${Y-⟨flag⟩}",
            'read -ra P <<< "⟨flag⟩"; X="${P[-1]}"',
            "read -r X <<E\n⟨flag⟩\nE",
        ),
    ),
}
START = (
    "shopt -s extglob\nA={A}\nB={B}\nC={C}\nS=tp=2 P=(q 'r s') R=(5 6); declare -A M=([xy]=m"
    ' [1]=n); f() {{ echo "<$1>"; }}\n'
)
DECIDED = 'X="--tp 4"\nif ⟨condition⟩; then\n  X="--tp 2"\nfi\n'
END = 'torchrun a.py --same 1 $X "$X"\n'


class CaseWriter(Writer):
    """Writes the scripts of this module."""

    def rule(self, name: str) -> str:
        """Return a text for a part, made by the grammar rule `name`.

        A deeply nested part gets the simplest text of this grammar rule.
        """
        self.depth += 1
        # The first way of each rule has no part of the same rule in it, so the nesting ends.
        choices = RULES[name][: 1 if self.depth > 8 else None]
        text = self.fill_template(self.choose(choices))
        self.depth -= 1
        return text


def case(choose: Callable[[Sequence[str]], str]) -> Script:
    """Return a script made of the parts that `choose` selects."""
    body = CaseWriter(choose).fill_template(choose((DECIDED, "X=\n⟨construct⟩\n")))
    return START.format(A=choose(SETTINGS), B=choose(SETTINGS), C=choose(SETTINGS)) + body + END, ()
