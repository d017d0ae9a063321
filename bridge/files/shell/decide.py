"""Conditions of a script: true, false, or undecided where only a run would tell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.files.shell.expand import Expander
from bridge.files.shell.pieces import Text, Unknown, spelled

if TYPE_CHECKING:
    from tree_sitter import Node

NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
TEXTS: Mapping[str, Callable[[str, str], bool]] = {
    "=": lambda text, pattern: fnmatchcase(text, pattern),
    "==": lambda text, pattern: fnmatchcase(text, pattern),
    "!=": lambda text, pattern: not fnmatchcase(text, pattern),
    "<": operator.lt,
    ">": operator.gt,
}
BRACKETS = ("[", "]", "[[", "]]", "(", ")", "((", "))", ";")
STARTED = ("the script is started with it", "the script sets it nowhere")
"""Reasons that make a variable empty in a condition: a script is read as started alone, without arguments."""


def holds(node: Node, expander: Expander) -> bool | None:
    """Whether the condition `node` holds; None where it depends on files, commands or values that are not known."""
    inner = [child for child in node.children if child.type not in BRACKETS]
    match node.type:
        case "test_command" if node.children[0].type == "((":
            return _truth(expander.calculated(node))
        case "test_command" | "parenthesized_expression":
            return holds(inner[0], expander) if len(inner) == 1 else _flat(inner, expander)
        case "binary_expression":
            return _binary(node, expander)
        case "unary_expression":
            return _unary(node, expander)
        case "negation_expression" | "negated_command":
            return _not(holds(node.children[-1], expander))
        case "string" | "raw_string" | "word" | "number" | "concatenation" | "simple_expansion" | "expansion":
            text = outright(node, expander)
            return None if text is None else bool(text)
    return None


def outright(node: Node, expander: Expander) -> str | None:
    """The text of a node in a condition; a variable that is set nowhere is empty."""
    pieces = expander.text(node)
    if any(isinstance(piece, Unknown) and not piece.why.startswith(STARTED) for piece in pieces):
        return None
    return spelled(piece for piece in pieces if isinstance(piece, Text))


def _truth(result: int | None) -> bool | None:
    return None if result is None else bool(result)


def _not(result: bool | None) -> bool | None:
    return None if result is None else not result


def _flat(nodes: list[Node], expander: Expander) -> bool | None:
    """`[ a = b ]` where the grammar leaves the three words side by side."""
    texts = [outright(node, expander) for node in nodes]
    if len(texts) == 3 and None not in texts and texts[1] in (*NUMBERS, *TEXTS):
        return _compared(str(texts[0]), str(texts[1]), str(texts[2]))
    return None


def _binary(node: Node, expander: Expander) -> bool | None:
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    sign = node.child_by_field_name("operator")
    if left is None or right is None or sign is None:
        return None
    word = expander.source.said(sign)
    if word in ("&&", "-a", "||", "-o"):
        return _joined(holds(left, expander), holds(right, expander), both=word in ("&&", "-a"))
    denied = left.type == "unary_expression" and expander.source.said(left.children[0]) == "!"
    texts = outright(left.children[-1] if denied else left, expander), outright(right, expander)
    result = None if texts[0] is None or texts[1] is None else _compared(texts[0], word, texts[1])
    return _not(result) if denied else result


def _joined(left: bool | None, right: bool | None, both: bool) -> bool | None:
    if left is (not both) or right is (not both):
        return not both
    return None if left is None or right is None else both


def _compared(left: str, sign: str, right: str) -> bool | None:
    if sign in NUMBERS:
        numbers = [int(text) for text in (left.strip(), right.strip()) if re.fullmatch(r"-?\d{1,18}", text)]
        return NUMBERS[sign](*numbers) if len(numbers) == 2 else None
    return TEXTS[sign](left, right) if sign in TEXTS else None


def _unary(node: Node, expander: Expander) -> bool | None:
    sign, operand = expander.source.said(node.children[0]), node.children[-1]
    if sign == "!":
        return _not(holds(operand, expander))
    text = outright(operand, expander)
    if text is None or sign not in ("-z", "-n", "-v"):
        return None
    return (expander.scope.get(text) is not None) if sign == "-v" else (text == "") == (sign == "-z")
