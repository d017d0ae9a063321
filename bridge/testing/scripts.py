"""A grammar of launch scripts: words, conditions, loops and functions, nested as in real scripts.

In a template, a part in angle brackets stands for a text that the grammar rule of this name makes: `⟨word⟩` for one word,
`⟨word*2⟩` for up to two words with blanks between them. `№` stands for a number that no other template of a script gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

Script = tuple[str, tuple[str, ...]]
"""The text of a script, and the names of the grammar productions from which it was made."""
PART = re.compile(r"⟨([a-z -]+)(?:\*(\d))?⟩")
NAMED = re.compile(r"\$([ABCD])(?=\w)", re.ASCII)
"""Matches `$NAME` directly before a letter, which a shell would read as a part of the name."""
DEEPEST = 6
"""Largest depth of nesting. Parts that are nested deeper get a simple text from `FLAT`."""
MOST = 60
"""Largest number of parts in a script. All further parts get a simple text from `FLAT`."""

_GLOBS = (
    "x*",
    "*y",
    "*",
    "?",
    "[a-z]*",
    "[!x]*",
    "[[:digit:]]",
    "@(xy|z)",
    "!(x)",
    "*(ab)",
    "+([0-9])",
    "?(x)y",
    '"x*"',
    "'*'",
)
_PARTS = (
    "*moe*",
    '*"moe"*',
    "x",
    "1",
    "a?b",
    "[0-9]",
    "*$A*",
    '"$A"',
    "$A",
    "${B}*",
    "a\\*",
    "\\*",
    "[[:upper:]]*",
    "*[,:]*",
    "--*",
)
_NUMBERS = ("0", "1", "2", "3", "7", "8", "10", "-1", "010", "0x1f", "2#101", "36#z")
_WORDS = ("x", "--bf16", "--tp=2", "a.b", "1", "_", "a/b", "a:b", "+", "%", "a=b", "-", "--", "a,b")
_TEXTS = (
    *(
        "''",
        "0",
        "1",
        "2",
        "8",
        "x",
        "xy",
        "amoe",
        "Foo",
        "'a b'",
        "' x'",
        "'x '",
        "'a  b'",
        "--bf16",
        "'--tp 2'",
        "a,b",
        "tp=2",
        "08",
    ),
    *(
        "-1",
        "a:b:c",
        "/a/b.txt",
        "x.y.z",
        "A",
        "B",
        "'it'\\''s'",
        "'x\ty'",
        "3",
        "12",
        "abab",
        "'$A'",
        "a=b=c",
        "1,2,",
        ",x",
        "'#'",
    ),
    *("'~'", "'!'", "-n", "']'", "'(x'", "'a\\b'", "'\"'"),
)

RULES: Mapping[str, tuple[str, ...]] = {
    "name": ("A", "B", "C", "D"),
    "list": ("P", "Q"),
    "text": _TEXTS,
    "bare": _WORDS,
    "glob": (*_GLOBS, *_PARTS),
    "part": _PARTS,
    "digits": _NUMBERS,
    "index": ("0", "1", "-1", "K", "$K", "1+1", "2", "$UNSET"),
    "key": ("k", "x", "$A", '"a b"', "$B"),
    "regex": (
        *(
            "^x",
            "x$",
            "^[0-9]+$",
            "moe",
            "^(a|x)",
            '"."',
            "^[[:alpha:]]+$",
            "^$",
            "[a-f]+",
            "^a.*e$",
            "$A",
            '^"$A"',
        ),
        *("(a)(b)", "\\.", "[^x]", "x?", "a{2}", "^.{2}$", "(moe|xy)$"),
    ),
    "operator": (
        "+",
        "-",
        "*",
        "/",
        "%",
        "**",
        "<<",
        ">>",
        "&",
        "|",
        "^",
        "<",
        "<=",
        ">",
        ">=",
        "==",
        "!=",
        "&&",
        "||",
    ),
    "replaced": (
        "x",
        "a",
        "b",
        "*b",
        "?",
        "[a-z]",
        "moe",
        "$A",
        "\\/",
        "=",
        ",",
        "+(a|b)",
        " ",
        '"*"',
    ),
    "operand": ('"$A"', '"$B"', "x", "1", '""', '"${C}"', "xy", '"$D"'),
    "subject": ("$A", '"$B"', "${C}", "xy", "$D", '"$A$B"'),
    "integer": ('"$K"', "$L", "1", "${#B}", "0", "3"),
    "counted": ("1", '"$K"', "12", "$L", "-3", "7", "x"),
    "sign": ("-eq", "-ne", "-lt", "-le", "-gt", "-ge"),
    "same": ("==", "=", "!="),
    "default": (
        "x",
        "a b",
        "$B",
        "${B}",
        '"$C"',
        "",
        "'y z'",
        "--lr 1",
        "$((K+1))",
        '"a  b"',
        "{a,b}",
        "x\\ y",
    ),
    "both": ("&&", "||"),
    "in quotes": (
        "x",
        " ",
        "a b",
        "--tp 2",
        "\\$",
        "\\\\",
        '\\"',
        "'",
        "{a,b}",
        "~",
        "\\n",
        "#",
        "\\x",
        "`echo x`",
        "\\\n",
    ),
    "inside": ("", "⟨piece⟩", "⟨piece⟩⟨piece⟩", "⟨piece⟩ ⟨piece⟩"),
    "word": ("⟨word part⟩", "⟨word part⟩", "⟨word part⟩⟨word part⟩"),
    "body": ("⟨statement⟩", "⟨statement⟩; ⟨statement⟩"),
    "launch": ("torchrun a.py ⟨word*2⟩",),
    "leave": (
        ":",
        "break",
        "continue",
        "⟨condition⟩ && break",
        "⟨condition⟩ && continue",
        "⟨condition⟩ || break",
    ),
    "end of item": (";;", ";;", ";&", ";;&"),
    "item": (
        "⟨glob⟩) ⟨body⟩ ⟨end of item⟩",
        "(⟨glob⟩|⟨glob⟩) ⟨body⟩ ⟨end of item⟩",
        "⟨glob⟩|1) ⟨body⟩ ⟨end of item⟩",
    ),
    "locals": (
        "",
        "local ⟨name⟩=⟨one word⟩;",
        "local ⟨name⟩;",
        "local K=5 L=$K;",
        "local -a P=(q);",
        "local A=1 B=$A;",
    ),
    "returned": (
        "",
        "; return 3",
        "; ⟨condition⟩ && return; ⟨statement⟩",
        "; return",
        "; shift; A=${1:-}",
        "; return $K",
    ),
    "marked": ("EOF", "'EOF'", '"EOF"', "\\EOF"),
    "line": (
        "x $A y",
        "$A",
        "a\\$b",
        "${B}",
        "$((K+1))",
        "'$A'",
        '"$C"',
        "\\\\x",
        "a b  c",
        "$(echo ⟨bare⟩)",
        '${A:-"x"}',
    ),
    "flags": ("-a", "-a -b x", "-bx -a y", "-ab x", "x", "-c -a", "-- -a"),
    "wrong": (*["4"] * 60, "126_953_125", "08", "1/0", "2**-1"),
    "any test": ("⟨one test⟩",),
    "here": (
        "\nx $A y",
        "\n\t$B",
        "\n$(echo q)\n${C}",
        "\n'$A' \"b\" \\$c",
        "\na\\\nb",
        "\n$((K+1))",
    ),
    "shifted": ("--a 1 --b=2 x", "-a $A", "--tp 2 -- y", '"$A" "$B"', ""),
    "assigned": ("⟨name⟩=⟨one word⟩", '"⟨name⟩=$B"', "$N=x", '"$N=$C y"', "'D=q r'", "⟨name⟩"),
    "alone": ("false", "(exit 3)", "[ 1 = 2 ]", "((0))", "true", "A=$(false)", "[[ x = y ]]"),
    "settled": (
        "⟨name⟩=⟨word⟩",
        "((⟨number⟩))",
        "⟨condition⟩",
        "{ ⟨statement⟩; ⟨condition⟩; }",
        "read -r A <<< ⟨word⟩",
    ),
    "plain": ("false", "(exit 3)", "[ 1 = 2 ]", "ask y", "((0))", "[[ x = y ]]", "true"),
    "failing": (
        "false",
        "(exit 3)",
        "[ 1 = 2 ]",
        "ask y",
        "((0))",
        "! true",
        "A=$(false)",
        "[[ x = y ]]",
        "true",
    ),
    "sourced": ("'A=src; B=\"${1:-}\"'", "'torchrun a.py src $A'", "'return 4'", "A=s B=t"),
    "evaluated": (
        '"A=1"',
        '"$N=x"',
        "'B=$A'",
        "A=$K",
        "'torchrun a.py $A'",
        '"P=(a b)"',
        '": x"',
        "'A=\"$B\"; C=$A'",
    ),
}
"""Parts for which one of several texts is selected, the simplest text first."""

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "${A}": ("${⟨name⟩}",),
    "${A:-word}": ("${⟨name⟩:-⟨default⟩}", "${⟨name⟩-⟨default⟩}"),
    "${UNSET:-word}": ("${UNSET:-⟨default⟩}", "${UNSET-⟨default⟩}"),
    "${A:=word}": ("${⟨name⟩:=⟨default⟩}", "${⟨name⟩=⟨default⟩}", "${NEW:=x}"),
    "${A:+word}": ("${⟨name⟩:+⟨default⟩}", "${⟨name⟩+⟨default⟩}", "${UNSET+x}"),
    "${#A}": ("${#⟨name⟩}",),
    "${A#pattern}": (
        "${⟨name⟩#⟨part⟩}",
        "${⟨name⟩##⟨part⟩}",
        "${⟨name⟩#*⟨part⟩}",
        "${⟨name⟩##*[/.:,]}",
    ),
    "${A%pattern}": (
        "${⟨name⟩%⟨part⟩}",
        "${⟨name⟩%%⟨part⟩}",
        "${⟨name⟩%⟨part⟩*}",
        "${⟨name⟩%%[/.:,]*}",
    ),
    "${A/pattern/word}": (
        *("${⟨name⟩/⟨replaced⟩/y}", "${⟨name⟩//⟨replaced⟩/$B}", "${⟨name⟩/#⟨replaced⟩/-}"),
        *(
            "${⟨name⟩/%⟨replaced⟩/z}",
            "${⟨name⟩//⟨replaced⟩}",
            "${⟨name⟩/⟨replaced⟩/}",
            '${⟨name⟩//⟨replaced⟩/"a b"}',
        ),
    ),
    "${A:n:m}": (
        *(
            "${⟨name⟩:0}",
            "${⟨name⟩:1}",
            "${⟨name⟩: -1}",
            "${⟨name⟩:$K}",
            "${⟨name⟩:$K+1}",
            "${⟨name⟩:(1)}",
            "${⟨name⟩:K:1}",
        ),
        *(
            "${⟨name⟩:0:1}",
            "${⟨name⟩:1:2}",
            "${⟨name⟩:9}",
            "${⟨name⟩:0:K}",
            "${⟨name⟩: -2:1}",
            "${⟨name⟩:K>1?0:1}",
        ),
    ),
    "${A^}": (
        "${⟨name⟩^}",
        "${⟨name⟩^^}",
        "${⟨name⟩,}",
        "${⟨name⟩,,}",
        "${⟨name⟩^^[a-m]}",
        "${⟨name⟩,x}",
    ),
    "${A@Q}": ("${⟨name⟩@Q}", "${⟨name⟩@U}", "${⟨name⟩@L}", "${⟨name⟩@u}"),
    "${!A}": ("${!N}", "${!N:-x}", "${!N%b}"),
    "${P[i]}": ("${⟨list⟩[⟨index⟩]}", "${⟨list⟩[⟨index⟩]:-none}", "$P", "${⟨list⟩[⟨index⟩]#a}"),
    "${#P[@]}": ("${#⟨list⟩[@]}", "${#⟨list⟩[*]}", "${#⟨list⟩[0]}", "${#⟨list⟩[1]}", "${#M[@]}"),
    "${M[key]}": ("${M[⟨key⟩]}", "${M[⟨key⟩]:-none}"),
    "${A/$B/}": (
        "${⟨name⟩/$⟨name⟩/x}",
        "${⟨name⟩//${⟨name⟩}}",
        "${⟨name⟩/#$⟨name⟩/y}",
        '${⟨name⟩/"$B"/z}',
        "${⟨name⟩%$⟨name⟩}",
    ),
    "${A#$B}": (
        '${⟨name⟩#"$⟨name⟩"}',
        "${⟨name⟩##$⟨name⟩}",
        '${⟨name⟩%%"${⟨name⟩:1}"*}',
        "${⟨name⟩#${⟨name⟩%?}}",
    ),
    "${A:-${B}}": (
        "${UNSET:-${⟨name⟩:-x}}",
        "${⟨name⟩:+${⟨name⟩}}",
        "${UNSET:-$(echo ⟨bare⟩)}",
        "${UNSET:-$((K+1))}",
    ),
    "${#P} loops": (
        "${⟨list⟩[${#⟨list⟩[@]}-1]:-none}",
        "${⟨list⟩[K-1]:-}",
        "${⟨list⟩[-1]:-z}",
        "${⟨list⟩[$((K*0))]:-}",
    ),
    "$# $?": ("$#", "$?", "${#}", "${1:-x}", "${2:-}", "${1+set}"),
}
_SPREAD: Mapping[str, tuple[str, ...]] = {
    "${P[@]}": ("${⟨list⟩[@]}",),
    "${P[*]}": ("${⟨list⟩[*]}",),
    "${P[@]:n:m}": (
        "${⟨list⟩[@]:0}",
        "${⟨list⟩[@]:1}",
        "${⟨list⟩[@]: -1}",
        "${⟨list⟩[@]:1:1}",
        "${⟨list⟩[@]:0:2}",
        "${⟨list⟩[*]:K}",
    ),
    "${P[@]op}": (
        *(
            "${⟨list⟩[@]/a/b}",
            "${⟨list⟩[@]#x}",
            "${⟨list⟩[@]%.*}",
            "${⟨list⟩[@]^^}",
            "${⟨list⟩[@]/#/--}",
        ),
        *(
            "${⟨list⟩[@]@Q}",
            "${⟨list⟩[*],,}",
            "${⟨list⟩[@]//⟨replaced⟩}",
            "${⟨list⟩[@]:-none}",
            "${⟨list⟩[@]+set}",
        ),
    ),
    "${!P[@]}": ("${!⟨list⟩[@]}", "${!M[@]}", "${!⟨list⟩[*]}"),
    "${M[@]}": ("${M[@]}", "${M[*]}"),
    "${!N*}": ("${!N@}", "${!UNS*}", "${!MM@}"),
    "$@": ("$@", "${@}", "$*", "${*}", "${@:1}", "${@:2}", "${@:1:1}", "${@#x}"),
}
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "$(echo)": ("$(echo ⟨one word⟩)", "$(echo ⟨one word⟩ ⟨one word⟩)", "$(echo -n ⟨bare⟩)"),
    "$(printf)": (
        *(
            "$(printf %s ⟨one word⟩)",
            "$(printf '%s-' ⟨one word⟩ ⟨one word⟩)",
            "$(printf %d $L)",
            "$(printf '%03d' $K)",
        ),
        *(
            "$(printf '%5s|' ⟨bare⟩)",
            "$(printf '%-4s|' ⟨bare⟩)",
            "$(printf %x $L)",
            "$(printf '%s\\n' a b)",
            "$(printf '%%')",
        ),
    ),
    "$(function)": ("$(show ⟨one word⟩)",),
    "`echo`": ("`echo ⟨bare⟩ $A`", '`echo "$B"`'),
    "$(sed)": (
        *(
            "$(echo ⟨one word⟩ | sed 's/a/X/')",
            "$(echo ⟨bare⟩ | sed 's/[0-9]/n/g')",
            '$(echo "$A" | sed "s/x*/-/g")',
        ),
        *(
            "$(echo ⟨bare⟩ | sed -E 's/(.)(.)/\\2\\1/')",
            "$(echo ⟨bare⟩ | sed 's/\\(.\\)=*/<\\1>/2')",
            "$(echo a/b | sed 's|/|:|;s/b/&&/')",
        ),
        *(
            "$(printf '%s\n' a ⟨one word⟩ b | sed -n '2p;$p')",
            "$(printf 'a\nb\n' | sed '/a/d')",
            "$(printf 'a\nb\n' | sed '1!s/^/# /')",
        ),
    ),
    "$(filter)": (
        *(
            "$(printf '%s\n' b ⟨bare⟩ a | head -n 2)",
            "$(echo ⟨bare⟩,b,c | cut -d, -f2-)",
            "$(echo abcd | cut -c2-3)",
            "$(seq 1 $L)",
        ),
        *(
            "$(printf '%s\n' 3 1 2 | sort -n | tail -n 1)",
            "$(printf '%s\n' a a b | uniq | wc -l)",
            "$(echo 'a b c' | awk '{print $2}')",
        ),
        *(
            "$(basename /a/⟨bare⟩.sh .sh)",
            "$(dirname /a/b/⟨bare⟩)",
            "$(echo ⟨bare⟩ | tr a-z A-Z)",
            "$(printf 'a\nb\n' | grep -c b)",
        ),
        *("$(expr $K + 2)", "$(seq -s, 3)", "$(echo x=1 | grep -o '[a-z]*')"),
    ),
    "$(cat <<E)": ("$(cat <<E⟨here⟩\nE\n)", "$(cat <<'E'⟨here⟩\nE\n)", "$(cat <<-E⟨here⟩\n\tE\n)"),
    "$(list)": (
        "$( ⟨condition⟩ && echo ⟨bare⟩ )",
        "$(A=x; echo $A)",
        "$( ⟨name⟩=⟨word⟩; echo $A )",
    ),
}
_QUOTED: Mapping[str, tuple[str, ...]] = {
    "'...'": ("⟨text⟩",),
    '"..."': ('"⟨inside⟩"',),
    "$'...'": (
        "$'a\\tb'",
        "$'x'",
        "$'it\\'s'",
        "$'\\x41'",
        "$'a\\nb'",
        "$'\\\\'",
        "$'\\101'",
        "$'\\u41'",
    ),
    '$"..."': ('$"x"', '$"$A"', '$"a b"'),
    "escape": (
        "é",
        "\\ ",
        "\\$A",
        "a\\ b",
        "\\\\",
        "\\'",
        '\\"',
        "\\*",
        "x\\\ny",
        "\\~",
        "\\{a,b\\}",
        "\\#",
        "\\%",
        "a\\,b",
        "\\=x",
        "\\-",
        "\\@",
    ),
    "bare": ("⟨bare⟩",),
}
PRODUCTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "parameter": _PARAMETERS,
    "spread": _SPREAD,
    "command": _COMMANDS,
    "piece": {
        "text in quotes": ("⟨in quotes⟩",),
        "$A in quotes": ("$⟨name⟩",),
        "parameter in quotes": ("⟨parameter⟩",),
        "spread in quotes": ("⟨spread⟩",),
        "$((...)) in quotes": ("$((⟨number⟩))",),
        "command in quotes": ("⟨command⟩",),
    },
    "one word": _QUOTED,
    "word part": {
        **_QUOTED,
        "$A": ("$⟨name⟩",),
        "parameter": ("⟨parameter⟩",),
        "spread": ("⟨spread⟩",),
        "$((...))": ("$((⟨number⟩))", "$[⟨number⟩]"),
        "command": ("⟨command⟩",),
        "{a,b}": ("{⟨bare⟩,b}", "{x,${A}}", "{a,{c,d}}", '{a,"x y"}', "{,z}", "{a,b}{c,d}"),
        "{1..3}": (
            "{1..3}",
            "{3..1}",
            "{a..c}",
            "{01..03}",
            "{1..7..3}",
            "{1..a}",
            "{x}",
            "{}",
            "x{a,b",
            "{1,}",
        ),
    },
    "number": {
        "digits": ("⟨digits⟩",),
        "name": ("K", "L", "$K", "UNSET", "${L}"),
        "a op b": (
            "⟨number⟩ ⟨operator⟩ 1",
            "⟨number⟩ ⟨operator⟩ 2",
            "⟨number⟩ ⟨operator⟩ K",
            "3 ⟨operator⟩ (⟨number⟩)",
        ),
        "( )": ("(⟨number⟩)", "( ( ⟨number⟩ ) )"),
        "? :": ("K ? ⟨digits⟩ : ⟨number⟩", "0 ? ⟨digits⟩ : 2", "L > 1 ? K ? 1 : 2 : 3"),
        "unary": ("-1", "!K", "~(L)", "+K", "- -1", "!!L", "-K ** 2"),
        "assign": (
            "(K += 1)",
            "(L = K + 1)",
            "(Q[1] = 2)",
            "(K *= 2)",
            "(L |= 4)",
            "(K -= 5)",
            "(K = L = 2)",
            "(L %= 2)",
        ),
        "++": ("K++", "++K", "L--", "--L", "K++ + ++K"),
        "comma": ("(K = 3, K + 1)", "(1, 2)"),
        "P[i]": ("R[0]", "R[1]", "R[K-K]", "R[-1]", "${#P[@]}", "${#A}", "${R[0]}"),
        "error": ("⟨wrong⟩",),
    },
    "one test": {
        "-n": (
            "-n $A",
            '-z "$B"',
            "-n ${C}",
            '-z "${UNSET:-}"',
            "-n ${P[0]}",
            "-z $UNSET",
            '-n "⟨inside⟩"',
        ),
        "word alone": ("$A", '"$B"', "x", '""', "$(echo)"),
        "== pattern": ("⟨subject⟩ ⟨same⟩ ⟨glob⟩",),
        "=~": ("⟨subject⟩ =~ ⟨regex⟩",),
        "-eq": ("K ⟨sign⟩ 1", "$K ⟨sign⟩ K", '"$L" ⟨sign⟩ $L', "1 ⟨sign⟩ 2+1", "${#A} ⟨sign⟩ 0"),
        "<": ("a < b", "b < a", "10 > 9", "xy > x"),
        "-v": ("-v A", "-v UNSET", "-v P", "-v P[1]", "-v P[7]", "-v M[k]", "-v B"),
        "! test": ("! ⟨any test⟩",),
        "(test)": ("( ⟨any test⟩ )",),
        "test && test": ("⟨any test⟩ && ⟨any test⟩",),
        "test || test": ("⟨any test⟩ || ⟨any test⟩",),
    },
    "primary": {
        "[ -n ]": ("-n ⟨operand⟩", "-z ⟨operand⟩"),
        "[ word ]": ("⟨operand⟩",),
        "[ = ]": ("⟨operand⟩ = ⟨operand⟩", "⟨operand⟩ == ⟨operand⟩", "⟨operand⟩ != ⟨operand⟩"),
        "[ -eq ]": ("⟨integer⟩ ⟨sign⟩ ⟨integer⟩",),
    },
    "simple": {
        "[ one ]": ("⟨primary⟩",),
        "[ ! ]": ("! ⟨primary⟩",),
        "[ -a ]": (
            "⟨primary⟩ -a ⟨primary⟩",
            "⟨primary⟩ -o ⟨primary⟩",
            "⟨primary⟩ -a ⟨primary⟩ -o ⟨primary⟩",
        ),
        "[ ( ) ]": (
            "\\( ⟨primary⟩ \\) -o ⟨operand⟩",
            "\\( ⟨primary⟩ \\)",
            "! \\( ⟨primary⟩ -a ⟨primary⟩ \\)",
        ),
        "[ few ]": ("", "!", "-n", '""', "! ''"),
        "[ unquoted ]": ("$A", "-n $B", "$C = x", "$UNSET = x", "$A $B", "-n $UNSET", "$A = $B"),
    },
    "condition": {
        "[[ ]]": ("[[ ⟨any test⟩ ]]",),
        "[ ]": ("[ ⟨simple⟩ ]",),
        "test": ("test ⟨simple⟩",),
        "(( ))": ("((⟨number⟩))",),
        "! condition": ("! ⟨condition⟩",),
        "condition && condition": ("⟨condition⟩ ⟨both⟩ ⟨condition⟩",),
        "true": ("true", "false", ":"),
        "{ condition; }": ("{ ⟨condition⟩; }", "( ⟨condition⟩ )"),
        "function in a condition": ("ask ⟨one word⟩",),
    },
    "statement": {
        "A=word": ("⟨name⟩=⟨word⟩",),
        "A+=word": ("⟨name⟩+=⟨word⟩",),
        "launch": ("⟨launch⟩",),
        "P=(...)": ("⟨list⟩=(⟨word*3⟩)", "⟨list⟩=([2]=⟨one word⟩ ⟨word⟩)"),
        "P+=(...)": ("⟨list⟩+=(⟨word⟩)", "⟨list⟩+=(⟨word⟩ z)", "⟨list⟩+=([9]=y)", "⟨list⟩+=x"),
        "P[i]=word": (
            "⟨list⟩[0]=⟨word⟩",
            "⟨list⟩[5]=⟨word⟩",
            "⟨list⟩[K]=⟨word⟩",
            "⟨list⟩[1+1]+=⟨word⟩",
            "R[-1]=⟨word⟩",
        ),
        "M[key]=word": ("M[k]=⟨word⟩", "M[${A}⟨bare⟩]=⟨word⟩", 'M["a b"]=⟨word⟩', "M[k]+=⟨word⟩"),
        "M=(...)": ("M=([k]=⟨one word⟩ [x]=⟨word⟩)", "M+=([y z]=⟨one word⟩)", "M=()"),
        "if": ("if ⟨condition⟩; then ⟨body⟩; fi",),
        "if else": ("if ⟨condition⟩; then ⟨body⟩; elif ⟨condition⟩; then ⟨body⟩; else ⟨body⟩; fi",),
        "case": (
            "case ⟨subject⟩ in ⟨item⟩ *) ⟨body⟩ ;; esac",
            "case ⟨subject⟩ in ⟨item⟩ ⟨item⟩ esac",
        ),
        "for": (
            "for ⟨name⟩ in ⟨word*2⟩; do ⟨body⟩; ⟨leave⟩; ⟨statement⟩; done",
            "for ⟨name⟩; do ⟨body⟩; done",
        ),
        "for (( ))": (
            "for ((i№=0; i№<2; i№++)); do ⟨body⟩; ⟨leave⟩; done",
            "for ((i№=K; i№<6; i№+=2)); do ⟨body⟩; done",
        ),
        "while": (
            "n№=0; while ((n№++ < 2)); do ⟨body⟩; ⟨leave⟩; done",
            "n№=; while [[ $n№ != xx ]]; do n№+=x; ⟨body⟩; done",
        ),
        "until": ("n№=0; until [ $n№ -ge 2 ]; do ⟨body⟩; n№=$((n№+1)); done",),
        "while true": (
            "while true; do ⟨body⟩; ⟨condition⟩ && break; break; done",
            "while :; do while :; do ⟨body⟩; break 2; done; done",
        ),
        "function": (
            'f№() { ⟨locals⟩ A=${1:-}; B="$*"; ⟨body⟩⟨returned⟩; }; f№ ⟨word*2⟩',
            'function f№ { ⟨locals⟩ A=${1:-}; B="$*"; ⟨body⟩⟨returned⟩; }; f№ ⟨word*2⟩',
            "function f№() { ⟨locals⟩ ⟨body⟩⟨returned⟩; }; f№ ⟨word*2⟩ && A=done",
        ),
        "a && b": ("⟨condition⟩ ⟨both⟩ ⟨statement⟩",),
        "a && b || c": (
            "⟨condition⟩ && ⟨settled⟩ || ⟨statement⟩",
            "⟨condition⟩ || ⟨settled⟩ && ⟨statement⟩",
        ),
        "( )": ("( ⟨body⟩ )", "( ⟨body⟩; exit 3 )"),
        "{ }": ("{ ⟨body⟩; }",),
        "pipe into while": ("echo ⟨one word⟩ | while read -r A B; do ⟨launch⟩; done",),
        "pipe": (
            "{ ⟨body⟩; } | { cat > /dev/null; ⟨name⟩=⟨text⟩; }",
            "echo x | { read -r A; ⟨body⟩; }",
        ),
        "read <<<": (
            *(
                "read -r A B <<< ⟨word⟩",
                "read -r A <<< ⟨word⟩",
                "IFS=, read -r A B C <<< ⟨word⟩",
                "IFS=: read -ra P <<< ⟨word⟩",
            ),
            *(
                "read -r -a P <<< ⟨word⟩",
                "IFS== read -r A B <<< ⟨word⟩",
                "read -r <<< ⟨word⟩; A=${REPLY:-}",
                "read A <<< ⟨one word⟩",
            ),
        ),
        "here-document": (
            "while IFS= read -r D; do ⟨name⟩=$D; done <<⟨marked⟩\n⟨line⟩\nz\nEOF\n:",
            "read -r A B <<-⟨marked⟩\n\t⟨line⟩\n\tz\n\tEOF\n:",
        ),
        "read < <( )": ("read -r A B < <(echo ⟨word⟩)",),
        "mapfile": (
            "mapfile -t ⟨list⟩ <<< ⟨one word⟩",
            "mapfile -t ⟨list⟩ < <(printf '%s\\n' a ⟨one word⟩)",
        ),
        "printf -v": (
            "printf -v ⟨name⟩ %s ⟨counted⟩",
            "printf -v ⟨name⟩ '%02d' ⟨integer⟩",
            "printf -v ⟨name⟩ '%s,' ⟨word*2⟩",
        ),
        "let": ("let K++", "let K=2", 'let "L = K + 1"', "let K+=1 L=K", "let K=L,L=2"),
        "(( )) alone": ("((⟨number⟩))",),
        "set --": ("set -- ⟨word*3⟩", "set -- a ⟨word⟩; A=${@: -1}", 'set -- "$@" ⟨word⟩'),
        "shift": ("shift", "shift 2", "shift 1 || A=none"),
        "unset": (
            "unset A",
            "unset B C",
            "unset 'P[0]'",
            "unset P",
            "unset 'M[k]'",
            "unset UNSET",
            "unset -v D",
        ),
        "declare": (
            "declare ⟨name⟩=⟨one word⟩",
            "declare -g ⟨name⟩=⟨one word⟩",
            "readonly Z№=1; A=$Z№",
            "declare -x ⟨name⟩=⟨word⟩",
        ),
        "declare -i": ("declare -i I; I=⟨digits⟩; A=${I:-}", "declare -i I=K; I+=2*L; A=${I:-}"),
        "declare -u": ("declare -u V; V=⟨one word⟩; A=${V:-}", "declare -l W=ABC; B=${W:-}"),
        "declare -a": ("declare -a ⟨list⟩=(⟨word⟩ ⟨one word⟩)",),
        "declare -n": ("declare -n r№=⟨name⟩; r№=⟨one word⟩; unset -n r№",),
        "export": ("export ⟨name⟩=⟨word⟩ ⟨name⟩", "export A; A=⟨word⟩"),
        "eval": ("eval ⟨evaluated⟩", 'eval "$N=\\$B"', "eval 'A=$(echo ⟨bare⟩)'"),
        "source": (
            "echo ⟨sourced⟩ > conf.sh; source ./conf.sh",
            "echo ⟨sourced⟩ > conf.sh; . ./conf.sh q ⟨bare⟩",
        ),
        "A=x command": ('A=⟨one word⟩ torchrun a.py "$A"', "A=⟨word⟩ ask x; B=$A"),
        "$? kept": ("⟨condition⟩; A=$?",),
        "! statement": ("! ⟨condition⟩; A=$?",),
        "comment": ("⟨statement⟩ # ' \" $( ((\n:", "# x\n⟨statement⟩"),
        "continued": ('torchrun a.py ⟨word⟩ \\\n  ⟨word⟩ \\\n  "$A"', "A=1 \\\n  B=⟨word⟩"),
        "escaped blank at the end": ("torchrun a.py ⟨word⟩ \\ \n:",),
        "set -e": (
            "set -e; ⟨condition⟩ && :; ⟨statement⟩; set +e",
            "(set -e; ⟨condition⟩; ⟨launch⟩)",
        ),
        "set -u": ("set -u; ⟨statement⟩; set +u",),
        "background": ("⟨name⟩=bg & wait", "⟨launch⟩ & wait"),
        "declare words": (
            "declare ⟨assigned⟩",
            "export ⟨assigned⟩ ⟨assigned⟩",
            "typeset ⟨assigned⟩",
            "readonly Y№=⟨word⟩; B=$Y№",
        ),
        "declare -g": (
            "g№() { declare -g ⟨name⟩=⟨one word⟩; local C=in; ⟨statement⟩; }; h№() { local ⟨name⟩=h B=$A; g№; ⟨body⟩; }; h№",
            "g№() { local ⟨name⟩=⟨one word⟩; declare -g ⟨name⟩=x; D+=$A; }; g№",
            "g№() { typeset ⟨name⟩=⟨one word⟩; typeset -g P=(g ⟨word⟩); }; g№",
        ),
        "unset a local": (
            "g№() { unset ⟨name⟩; D+=${A-gone}; }; h№() { local ⟨name⟩=⟨one word⟩; g№; D+=${A-no}; }; h№",
            "h№() { local ⟨name⟩=⟨one word⟩; unset ⟨name⟩; A+=y; D+=${B-}; }; h№",
        ),
        "local marks": (
            "declare -i J№=1; h№() { local J№=⟨one word⟩; D=$J№; }; h№; J№=2+3; C=$J№",
            "h№() { local -i j=2+K; j+=1; local -u u=⟨one word⟩; A=$j$u; }; h№",
            "h№() { local -a P=(⟨word⟩ z); local -A M=([k]=in); A=${#P[@]}${M[k]}; }; h№",
            "h№() { local -n ref=$1; ref=⟨one word⟩; }; h№ ⟨name⟩",
        ),
        "trap": (
            "(trap 'torchrun t.py \"$A\"' EXIT; ⟨body⟩)",
            "trap 'torchrun e.py $?' ERR; ⟨failing⟩; ⟨failing⟩ || :; trap - ERR",
            "(set -e; trap 'torchrun e.py' ERR; ⟨failing⟩; torchrun b.py)",
        ),
        "set -e functions": (
            "(set -e; h№() { ⟨failing⟩; torchrun in.py⟨returned⟩; }; h№ x; torchrun out.py)",
            "(set -e; h№() { ⟨failing⟩; torchrun in.py; :; }; if h№; then ⟨statement⟩; fi; h№ || torchrun or.py; torchrun o.py)",
            "(set -e; A=$(⟨failing⟩; echo q); torchrun out.py $A; { ⟨failing⟩; } && :; (⟨failing⟩); torchrun end.py)",
            "(set -eo pipefail; ⟨plain⟩ | true; for A in 1 2; do ⟨failing⟩ && break; done; torchrun out.py)",
            "(shopt -s inherit_errexit; set -e; A=$(⟨failing⟩; echo q); torchrun out.py $A)",
        ),
        "set -u bounds": (
            '(set -u; torchrun a.py "${P[@]}" "$@" "${UNSET:-}" "${#P[@]}" "${1-}"; ⟨statement⟩)',
            "(set -u; : ${UNSET:=⟨default⟩}; torchrun a.py $UNSET)",
        ),
        "PIPESTATUS": (
            "⟨plain⟩ | ⟨plain⟩ | true; A=${PIPESTATUS[0]}${PIPESTATUS[1]}",
            "⟨plain⟩ | true; B=${PIPESTATUS[*]}",
        ),
        "option loop": (
            "set -- ⟨shifted⟩; while [ $# -gt 0 ]; do case $1 in --*=*) A=${1#*=};; -a|--a) B=${2-}; shift;; --) break;;"
            " *) C+=$1;; esac; shift; done",
            'for D in ⟨shifted⟩; do case "$D" in --*=*) eval "${D:2:1}№=⟨bare⟩";; -*) A+=$D;; *) B+=$D;; esac; done',
        ),
        "read from lines": (
            'while IFS== read -r k№ v№; do A+=$k№; B=${v№:-}; done <<< "⟨inside⟩"',
            "while read -r D; do [[ -z $D ]] && continue; A+=$D,; done <<EOF\n⟨line⟩\n\n#x\nEOF\n:",
            'while read -r A B || [ -n "$A" ]; do torchrun r.py "$B"; done < <(printf \'%s\' ⟨one word⟩)',
            "{ read -r A; read -r B; } <<< $'l1\nl2'",
            "IFS=, read -ra P <<< ⟨one word⟩; A=${#P[@]}",
            "mapfile -t -s 1 -n 1 ⟨list⟩ < <(printf '%s\\n' ⟨one word⟩ b c)",
            "read -r -d '' A <<E || :\n⟨line⟩\nE\n:",
        ),
        "file": (
            "echo ⟨one word⟩ > f№; A=$(cat f№); echo y >> f№; mapfile -t P < f№",
            "printf '%s\\n' x ⟨one word⟩ | tee f№ > /dev/null; B=$(< f№)",
            "cat > f№ <<EOF\n⟨line⟩\nEOF\nsed -i 's/x/q/' f№; C=$(cat ./f№)",
            "{ ⟨name⟩=x; echo ⟨one word⟩; } > f№; read -r A < f№",
            "A=$( { echo e >&2; echo o; } 2>&1 ); B=$( { echo e >&2; echo o; } 2> /dev/null )",
        ),
        "pipeline in a list": (
            "⟨plain⟩ | ⟨plain⟩ | ⟨plain⟩ && ⟨name⟩=⟨one word⟩ || ⟨name⟩=⟨one word⟩",
            "echo ⟨one word⟩ | cat | sed 's/x/y/' && ⟨statement⟩ || ⟨name⟩=n",
            "⟨condition⟩ && echo ⟨bare⟩ | cat | tr a-z A-Z > f№ && A=$(cat f№)",
            "! ⟨plain⟩ | true | cat | ⟨plain⟩ || B=p; C=$?",
            "A=$(echo ⟨one word⟩ | cat | cat && echo ⟨bare⟩ | cat || ⟨plain⟩ | true | cat)",
        ),
        "folders": (
            "mkdir -p d№/e; cd d№; echo ⟨one word⟩ > f; cd e; B=$(cat ../f); cd ../..; A=$(cat d№/f)",
            "mkdir d№; pushd d№ > /dev/null; echo ⟨one word⟩ > f; popd > /dev/null; A=$(cat d№/f)",
            "mkdir d№; (cd d№ && echo A=⟨bare⟩ > c.sh); . d№/c.sh; ⟨statement⟩",
            "mkdir -p d№ && cd d№ && echo 'torchrun c.py $1' > c.sh; bash c.sh ⟨one word⟩; cd ..; bash d№/c.sh ⟨bare⟩",
            "echo ⟨bare⟩ > f№; mkdir d№; mv f№ d№; cp d№/f№ g№; A=$(cat g№ d№/f№); rm -r d№; B=$(cat d№/f№)",
        ),
        "changed files": (
            "echo ⟨one word⟩ > f№; cp f№ g№; echo z >> g№; A=$(cat g№) B=$(cat f№)",
            "echo A=⟨bare⟩ > c№.sh; mv c№.sh m№.sh; . ./m№.sh; . ./c№.sh; B=$?",
            "echo x > f№; rm -f f№ g№; A=$(cat f№); B=$?; echo ⟨one word⟩ >> f№; C=$(cat f№)",
            "echo A=⟨bare⟩ > c№.sh; ⟨condition⟩ && rm c№.sh; . ./c№.sh || B=none",
            "printf 'A=%s\\n' ⟨counted⟩ > c№; sed -i 's/1/9/' c№; . ./c№",
            "echo ⟨one word⟩ | tee -a f№ g№ > /dev/null; touch f№ h№; A=$(cat f№ g№ h№)",
            "echo A=x > c№; set -C; echo A=⟨bare⟩ > c№ || B=kept; echo B=⟨bare⟩ >> c№; set +C; . ./c№",
            "echo 'echo \"$1\" > f№' > g№.sh; bash g№.sh ⟨one word⟩; read -r A < f№",
        ),
        "cleared environment": (
            "export X№=⟨one word⟩; env -u X№ bash -c 'torchrun e.py \"${X№-none}\"'",
            'export X№=x; env -i PATH="$PATH" Y№=⟨bare⟩ bash -c \'torchrun e.py "${X№-none}" "$Y№"\'',
            "X№=⟨one word⟩ env --unset=X№ bash -c 'torchrun e.py ${X№:-none}'; env Z№=⟨one word⟩ bash -c 'torchrun e.py \"$Z№\"'",
        ),
        "IFS and arrays": (
            'IFS=,; A="${⟨list⟩[*]}" B=${⟨list⟩[*]}; torchrun i.py ${⟨list⟩[*]} "${⟨list⟩[@]/#/-}"; IFS=$\' \\t\\n\'',
            'A=$(IFS=:; echo "${⟨list⟩[*]}"); B=$(IFS=-; echo ${⟨list⟩[*]})',
            "IFS=: read -ra ⟨list⟩ <<< ⟨one word⟩; IFS=-; B=\"${⟨list⟩[*]}\"; IFS=$' \\t\\n'",
            'f№() { local IFS=,; A="$*"; set -- ${⟨list⟩[@]}; B=$#; C=("$@"); }; f№ ⟨word*2⟩; unset C; C=c',
        ),
        "getopt": (
            '{ O№=$(getopt -o ab: -l tp:,pp:: -- ⟨shifted⟩); eval set -- "$O№"; while true; do case $1 in --tp|-b) A=$2; shift 2'
            ";; --) shift; break;; *) B+=$1; shift;; esac; done; }",
            "A=$(getopt -u -o a:b -- ⟨flags⟩); B=$(getopt -o +ab: -- ⟨flags⟩); C=$?",
        ),
        "another shell": (
            "bash -c 'torchrun c.py \"$@\" $0' ⟨one word⟩ ⟨word*2⟩",
            'bash -c "torchrun c.py ⟨bare⟩ $K"; E№=⟨one word⟩ bash -c \'torchrun c.py "$E№"\'',
            "bash -ec '⟨alone⟩; torchrun c.py'; bash <<'E'\ntorchrun h.py $((1+1))\nE\n:",
            "export X№=⟨one word⟩; bash -c 'torchrun c.py \"$X№\"'; env X№=⟨bare⟩ bash -c 'torchrun c.py $X№'",
            "echo 'torchrun s.py \"$1\"' > s.sh; bash s.sh ⟨one word⟩; bash -s -- ⟨one word⟩ < s.sh",
        ),
        "leave outside": (
            "(break; torchrun l.py)",
            "(continue 2; torchrun l.py)",
            "k№() { break; A=k; }; for B in 1 2; do k№; done",
        ),
        "command in a variable": (
            'c№="torchrun v.py $A"; $c№; eval "$c№ ⟨bare⟩"',
            'c№=(torchrun v.py ⟨word⟩); "${c№[@]}" x; ${c№[@]}',
            'k№() { torchrun "$@"; }; k№ v.py ⟨word*2⟩',
        ),
        "nested functions": (
            "o№() { i№() { A+=$1; B=$#; }; i№ ⟨word⟩; }; o№ ⟨word⟩; i№ z",
            'r№() { [ $# -gt 0 ] || return 0; A+=$1; shift; r№ "$@"; }; r№ ⟨one word⟩ b c',
        ),
        "BASH_REMATCH": (
            "[[ ⟨subject⟩ =~ ^([a-z]*)([0-9:.]*)(.*)$ ]] && A=${BASH_REMATCH[1]}+${BASH_REMATCH[2]}",
            "re='([a-z]+)=?([^=]*)'; [[ $A =~ $re ]] && B=\"${BASH_REMATCH[0]}|${BASH_REMATCH[2]}\"",
        ),
        "without extglob": (
            '(shopt -u extglob; A=\'+(a)b\'; torchrun n.py "${A#+(a)}" "${A/@(a)/x}" "${A%?(b)}")',
        ),
        "getopts": ("OPTIND=1; while getopts 'ab:' o ⟨flags⟩; do A+=$o${OPTARG:-}; done",),
        "undecided options": (
            'if [ -n "$HOSTNAME" ]; then set -f; fi; torchrun u.py ⟨bare⟩; set +f',
            'if [ -n "$HOSTNAME" ]; then set -C; else set +C; fi; set +C; echo ⟨bare⟩ > f№; A=$(cat f№)',
            'if [ -n "$HOSTNAME" ]; then shopt -s nocasematch; fi; shopt -u nocasematch; ⟨condition⟩ && A=n',
        ),
        "undecided exports": (
            'if [ -n "$HOSTNAME" ]; then export X№=1; else export X№=2; fi; X№=⟨one word⟩; bash -c \'torchrun u.py "$X№"\'',
            'if [ -z "$HOSTNAME" ]; then export X№; fi; export X№=⟨one word⟩; bash -c \'torchrun u.py "$X№"\'',
            'if [ -n "$HOSTNAME" ]; then export X№=q; fi; unset X№; torchrun u.py "${X№-none}"',
        ),
        "undecided marks": (
            'if [ -z "$HOSTNAME" ]; then declare -i X№; fi; declare +i X№; X№=⟨one word⟩; A=$X№',
            'if [ -n "$HOSTNAME" ]; then declare -u X№; fi; declare +u X№; X№=⟨one word⟩; A=$X№',
        ),
        "BASH_SOURCE": (
            "echo '[[ ${BASH_SOURCE[0]} != \"$0\" ]] && C=s' > c№.sh; . ./c№.sh",
            'if [ "${BASH_SOURCE[0]}" = "$0" ]; then A=⟨bare⟩; fi',
            'echo \'[[ "${BASH_SOURCE[0]}" == "$0" ]] || return 0; torchrun s.py\' > c№.sh; source ./c№.sh; B=$?',
        ),
        "file test before source": (
            "echo A=⟨bare⟩ > c№.sh; if [ -f c№.sh ]; then . ./c№.sh; fi",
            "echo A=⟨bare⟩ > c№.sh; [ -s ./c№.sh ] && source ./c№.sh; rm c№.sh; [[ -e c№.sh ]] || B=none",
            "echo A=⟨bare⟩ > c№.sh; [[ -f c№.sh && -n $A ]] && . ./c№.sh || B=⟨bare⟩",
        ),
        "exported arrays": (
            "P№=(a ⟨word⟩); export P№; bash -c 'torchrun x.py \"${P№-none}\" ${#P№[@]}'",
            "export P№=(a b); P№=⟨one word⟩; bash -c 'torchrun x.py \"${P№-none}\"'",
            'declare -ax P№=(⟨one word⟩); P№=5 bash -c \'torchrun x.py "${P№-none}"\'; torchrun y.py "${P№[@]}"',
        ),
        "assignments in redirections": (
            "unset U№; torchrun r.py > ${U№:=f№}; torchrun r.py ${U№-unset}",
            "unset U№; ask x > ${U№:=f№}; A=$U№; : > g$((K=2)); B=$K",
            "unset U№; cat > ${U№:=f№} < /dev/null; A=${U№-unset}",
        ),
        "references to elements": (
            "e№=(a b c); declare -n r№=e№[1]; r№=⟨one word⟩; A=$r№; unset -n r№; B=${e№[*]}",
            "e№=(a b c); g№() { local -n o=$1; o=⟨one word⟩; }; g№ 'e№[2]'; B=${e№[*]}",
        ),
        "moved references": (
            "declare -n r№=A; declare -n r№=B; r№=⟨one word⟩; unset -n r№",
            "declare -n r№=A; for r№ in B C; do r№+=⟨bare⟩; done; unset -n r№",
            "g№() { local -n o№=$1 p№=$2; o№=$p№; p№=⟨one word⟩; }; g№ ⟨name⟩ ⟨name⟩",
        ),
        "signals": (
            "(trap 'torchrun t.py \"$A\"' USR1; ⟨statement⟩; kill -USR1 ${BASHPID}; torchrun a.py)",
            "(trap 'torchrun t.py; exit 3' TERM; kill -TERM ${BASHPID}; torchrun a.py); A=$?",
            "(trap '' INT; kill -INT ${BASHPID}; trap - INT; torchrun a.py; kill -INT ${BASHPID}; torchrun b.py); A=$?",
            "(trap 'A=$?; torchrun t.py $A' EXIT; (exit 4)); (trap 'torchrun t.py $?' EXIT; ⟨failing⟩; exit)",
        ),
        "nocasematch": (
            '(shopt -s nocasematch; [[ ⟨subject⟩ == ⟨part⟩ ]] && torchrun m.py; [ "$A" = foo ] || torchrun o.py)',
            "(shopt -s nocasematch; case ⟨subject⟩ in f*) torchrun n.py;; *[A-F]*) torchrun q.py;; esac)",
            '(shopt -s nocasematch; [[ ⟨subject⟩ =~ ^F(o+)$ ]] && torchrun m.py "${BASH_REMATCH[1]}")',
            '(shopt -s nocasematch; torchrun p.py "${A/o/x}" "${A#f}" "${A%%O*}" "${A//X}"); [[ $B != XX ]] && A=q',
        ),
        "set -- in a sourced file": (
            "echo 'set -- q ⟨bare⟩; torchrun s.py $#; :' > c№.sh; . ./c№.sh; A=$#; . ./c№.sh z; B=$*",
            "echo 'shift; torchrun s.py \"$@\"; :' > c№.sh; set -- 1 ⟨one word⟩; . ./c№.sh; . ./c№.sh z y; B=$*",
        ),
        "set -o": (
            "[[ -o nounset ]] || A=off; set -o nounset; [[ -o nounset ]] && B=on; set +o nounset",
            "(set -o noglob; torchrun a.py * $A); (set -o nounset; torchrun a.py ${UNSET-x})",
            "(set +o braceexpand; torchrun a.py {a,b})",
            "set -o pipefail; ⟨plain⟩ | true; A=$?; set +o pipefail",
        ),
        "shopt -s": (
            "shopt -q extglob && A=ext; shopt -q nocasematch || B=no",
            "shopt -s lastpipe; echo ⟨one word⟩ | read -r A; shopt -u lastpipe",
            "(shopt -s xpg_echo; torchrun a.py \"$(echo 'a\\tb')\")",
        ),
        "bad substitution": (
            "bash -c 'torchrun a.py ${a b}; torchrun b.py'; torchrun c.py",
            "bash -c 'A=${a b}; torchrun a.py'; torchrun c.py ⟨word⟩",
            "echo 'torchrun a.py; echo ${a!}; torchrun b.py' > s№.sh; bash s№.sh; torchrun c.py",
        ),
        "exported functions": (
            'e№() { torchrun e.py "$@"; }; export -f e№; bash -c \'e№ x "$1"\' _ ⟨one word⟩; bash -c e№',
            "e№() { torchrun e.py; }; export -f e№; (unset -f e№; bash -c e№); bash -c e№",
            "e№() { torchrun e.py; }; export -f e№; env -u BASH_FUNC_e№%% bash -c e№; bash -c 'bash -c e№'",
            "e№() { torchrun e.py $1; }; export -f e№; export -nf e№; bash -c e№; export -f e№; echo 'e№ s' > s№.sh; bash s№.sh",
            "e№() { torchrun e.py; }; export -f e№; bash -c 'e№() { torchrun in.py; }; bash -c e№'",
        ),
        "read-only": (
            "readonly Z№=x; Z№=y; torchrun z.py $Z№\nA=$Z№",
            "readonly Z№=x; (Z№=y; torchrun z.py $Z№); A=$Z№",
            "readonly Z№=x; f№() { local Z№=y; torchrun z.py $Z№; }; f№; A=$Z№",
            "readonly Z№=x; unset Z№ || A=kept; declare Z№=y; B=$?",
            "readonly -a Z№=(a b); Z№+=(c); torchrun z.py\nA=${Z№[*]}",
            "readonly -a Z№=(a b); Z№[0]=c; torchrun z.py\nA=${Z№[*]}",
        ),
        "killed in the background": (
            "torchrun k.py ⟨word⟩ & wait; kill $! 2> /dev/null; A=k",
            "echo ⟨one word⟩ > f№ & wait; A=$(cat f№)",
        ),
        "IFS": (
            "IFS=,; ⟨statement⟩; IFS=$' \\t\\n'",
            "IFS=:; ⟨statement⟩; IFS=$' \\t\\n'",
            "IFS=; ⟨statement⟩; IFS=$' \\t\\n'",
        ),
        "status of a substitution": ("A=$( ⟨condition⟩ ); B=$?",),
    },
}
"""Grammar productions, grouped by the rule that selects one of them."""
FLAT: Mapping[str, str] = {
    "word part": "⟨text⟩",
    "one word": "⟨text⟩",
    "piece": "⟨in quotes⟩",
    "number": "⟨digits⟩",
    "condition": '[[ -n "$A" ]]',
    "one test": '-n "$A"',
    "statement": "⟨name⟩=⟨text⟩",
    "command": "$(echo ⟨bare⟩)",
}
"""Simple texts by grammar rule, for parts that are nested too deeply or come too late in a script."""
START = (
    "shopt -s extglob",
    "A=⟨text⟩ B=⟨text⟩ C=⟨text⟩ D=⟨text⟩",
    "K=1 L=3 N=A R=(4 5)",
    "P=(a 'b c') Q=()",
    "declare -A M=([k]=v)",
    'show() { echo "<$1>"; }',
    'ask() { [ "$1" = x ]; }',
)
BEFORE = (
    "if [[ ⟨any test⟩ ]]; then A+=y; fi",
    "if ⟨condition⟩; then B+=y; fi",
    'torchrun a.py $((⟨number⟩)) "⟨parameter⟩" ⟨parameter⟩ "⟨spread⟩" ⟨command⟩',
)
"""Lines at the start of each script, so that each script has the kinds of parts that are otherwise
only deep inside statements.
"""
END = 'torchrun a.py "$A" "$B" "$C" "$D" "$K" "$L" "${P[@]}" . "${Q[@]}" . "${M[k]}" "$#" "$@"'


@dataclass
class Writer:
    """Writes scripts. `used` are the names of the productions that were used."""

    choose: Callable[[Sequence[str]], str]
    used: list[str] = field(default_factory=list)
    depth: int = 0
    serial: int = 0
    parts: int = 0

    def fill_template(self, template: str) -> str:
        """Return `template` with all parts in angle brackets filled in."""
        if "№" in template:
            self.serial += 1
            template = template.replace("№", str(self.serial))
        return PART.sub(self._part, template)

    def _part(self, match: re.Match[str]) -> str:
        if match[2] is None:
            return self.rule(match[1])
        counts = [str(number) for number in range(int(match[2]) + 1)]
        return " ".join(self.rule(match[1]) for _ in range(int(self.choose(counts))))

    def rule(self, name: str) -> str:
        """Return a text for a part, made by the grammar rule `name`."""
        if name in RULES:
            return self.fill_template(self.choose(RULES[name]))
        self.parts += 1
        if name in FLAT and (self.depth >= DEEPEST or self.parts > MOST):
            return self.fill_template(FLAT[name])
        choices = PRODUCTIONS[name]
        production = self.choose(list(choices))
        self.used.append(production)
        self.depth += 1
        text = self.fill_template(self.choose(choices[production]))
        self.depth -= 1
        return text


def write_script(choose: Callable[[Sequence[str]], str]) -> Script:
    """Return a script made of the parts that `choose` selects."""
    write = Writer(choose)
    lines = [write.fill_template(line) for line in START]
    lines += [write.rule("statement") for _ in range(int(choose("1234")))]
    lines += [write.fill_template(line) for line in BEFORE]
    # A name directly before letters gets braces, or bash would read a longer, unset name.
    return NAMED.sub(r"${\1}", "\n".join([*lines, END, ""])), tuple(write.used)


@st.composite
def scripts(draw: Callable[[st.SearchStrategy[str]], str]) -> Script:
    """Return a strategy for scripts, each with the productions from which it was made."""
    return write_script(lambda choices: draw(st.sampled_from(list(choices))))
