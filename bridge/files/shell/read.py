"""A small evaluator over a script's syntax tree: which commands it would start, with what words; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.errors import SourceError
from bridge.files.shell.decide import holds, outright
from bridge.files.shell.expand import OUTPUT, Expander
from bridge.files.shell.pieces import NOWHERE, Piece, Pieces, Text, Unknown, known, spelled
from bridge.files.shell.scope import Scope, Value
from bridge.files.shell.source import Source, check_redirects, check_syntax

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_STEPS = 10_000
DEEPEST = 30
SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
DECLARING = ("export", "declare", "local", "readonly", "typeset")


@dataclass(frozen=True)
class Command:
    """A command that the script starts: its words, the variables set for it, and the line on which it begins.

    `branch` is the line of an undecided `if`, `case` or loop around it; 0 if it is started in any case.
    """

    words: tuple[Pieces, ...]
    environment: Mapping[str, Pieces]
    line: int
    branch: int = 0


@dataclass
class Reader:
    """Walks statements, keeps a scope, and collects commands, files written and what was odd."""

    name: str
    scope: Scope
    commands: list[Command] = field(default_factory=list)
    oddities: list[tuple[int, str]] = field(default_factory=list)
    sourced: list[tuple[int, str]] = field(default_factory=list)
    branch: int = 0
    depth: int = 0
    steps: int = 0
    source: Source = field(init=False)

    def read(self, text: str) -> None:
        """Read the whole script."""
        source = Source(text, self.name)
        check_syntax(source)
        self.run(source)

    def run(self, source: Source) -> None:
        """Read a source in the present scope."""
        before, self.source = getattr(self, "source", source), source
        self.statements(source.root.children)
        self.source = before

    @property
    def expander(self) -> Expander:
        """The expander of what is being read."""
        return Expander(self.source, self.scope)

    def line(self, node: Node) -> int:
        """The line of a node in the script, from 1."""
        return self.source.line(node)

    def refuse(self, node: Node, problem: str) -> SourceError:
        """An error at a node."""
        return SourceError(f"{self.name}: line {self.line(node)}: {problem}")

    def statements(self, nodes: Sequence[Node]) -> None:
        """One after the other, until one ends the path."""
        for node in nodes:
            if self.scope.ended:
                return
            self.statement(node)

    def statement(self, node: Node) -> None:
        """One statement of any kind; what has no effect on words is passed over."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise self.refuse(node, f"found more than {MOST_STEPS:,} steps; a launch script does less, is this the right file?")
        try:
            STATEMENTS.get(node.type, Reader.passed)(self, node)
        except OverflowError as error:
            raise self.refuse(node, str(error)) from None

    def passed(self, node: Node) -> None:
        """Comments, separators, conditions that stand alone."""

    # Blocks and branches

    def block(self, node: Node) -> None:
        """`{ ... }` and the script itself."""
        if node.children and node.children[0].type == "((":
            self.counting(node)
        else:
            self.statements(node.children)

    def subshell(self, node: Node) -> None:
        """`( ... )` and pipes: assignments stay inside."""
        outer = self.scope
        self.scope = outer.copy()
        self.statements(node.children)
        outer.files |= self.scope.files
        self.scope = outer

    def undecided(self, bodies: Sequence[Sequence[Node]], line: int) -> None:
        """One of several branches is taken, nobody knows which."""
        outer, around = self.scope, self.branch
        branches: list[Scope] = []
        for body in bodies:
            self.scope, self.branch = outer.copy(), line
            self.statements(body)
            branches.append(self.scope)
        self.scope, self.branch = outer, around
        self.scope.take(branches, line)

    def if_(self, node: Node) -> None:
        """The branches that may be taken: the first whose condition holds ends the list."""
        possible: list[Sequence[Node]] = []
        for condition, body in _branches(node):
            truth = True if condition is None else self.truth(condition)
            if truth is not False:
                possible.append(body)
            if truth:
                break
        else:
            possible.append(())
        self._taken(possible, node)

    def _taken(self, possible: Sequence[Sequence[Node]], node: Node) -> None:
        if len(possible) == 1:
            self.statements(possible[0])
        else:
            self.undecided(possible, self.line(node))

    def truth(self, node: Node) -> bool | None:
        """Whether a condition holds."""
        if node.type == "list":
            left, sign, right = node.children[0], node.children[1].type, node.children[-1]
            results = self.truth(left), self.truth(right)
            decisive = sign == "||"
            if decisive in results:
                return decisive
            return None if None in results else not decisive
        if node.type == "command":
            return {"true": True, ":": True, "false": False}.get(self.source.said(node))
        if node.type == "compound_statement" and node.children[0].type == "((":
            result = self.expander.calculated(node)
            return None if result is None else bool(result)
        return holds(node, self.expander)

    def case(self, node: Node) -> None:
        """The first pattern that fits, or any where the value is not known."""
        items = [child for child in node.children if child.type == "case_item"]
        value = node.child_by_field_name("value")
        text = outright(value, self.expander) if value is not None else None
        bodies = [(self._patterns(item), _case_body(item)) for item in items]
        if text is None:
            self.undecided([body for _, body in bodies] + [()], self.line(node))
            return
        fitting = (body for patterns, body in bodies if any(fnmatchcase(text, pattern) for pattern in patterns))
        self.statements(next(fitting, ()))

    def _patterns(self, item: Node) -> list[str]:
        values = item.children_by_field_name("value")
        return [spelled(self.expander.text(value)) for value in values]

    def loop(self, node: Node) -> None:
        """A loop over one known word is read; any other runs none or more times."""
        body = node.child_by_field_name("body")
        inside = body.children if body is not None else ()
        variable = node.child_by_field_name("variable")
        listed = [word for value in node.children_by_field_name("value") for word in self.expander.words(value)]
        if variable is not None and len(listed) == 1 and known(listed[0]) is not None:
            self.scope.set(self.source.said(variable), Value((listed[0],)))
            self.statements(inside)
        elif node.type != "while_statement" or self._runs(node):
            self._repeated(node, variable, inside)
        if self.scope.ended in ("break", "continue"):
            self.scope.ended = ""

    def _runs(self, node: Node) -> bool:
        condition = node.child_by_field_name("condition")
        until = node.children[0].type == "until"
        return condition is None or self.truth(condition) is not until

    def _repeated(self, node: Node, variable: Node | None, inside: Sequence[Node]) -> None:
        if variable is not None:
            name, line = self.source.said(variable), self.line(node)
            place = self.source.place(variable.start_byte, variable.end_byte)
            self.scope.set(name, Value(((Unknown(f"${name}", place, line, "a loop gives it several values"),),)))
        self.undecided([inside, ()], self.line(node))

    def list_(self, node: Node) -> None:
        """`a && b`, `a || b`: conditions decide; other commands are taken to succeed."""
        left, sign, right = node.children[0], node.children[1].type, node.children[-1]
        truth = self.truth(left)
        condition = left.type in ("test_command", "negated_command") or truth is not None
        if not condition:
            self.statement(left)
        wanted = sign == "&&"
        if truth is wanted or (truth is None and not condition and wanted):
            self.statement(right)
        elif truth is None:
            self.undecided([[right], ()], self.line(node))

    # Functions

    def function(self, node: Node) -> None:
        """A definition: read when it is called."""
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.scope.functions[self.source.said(name)] = self.source, body

    def call(self, node: Node, name: str, arguments: Sequence[Pieces]) -> None:
        """A function with its arguments."""
        source, body = self.scope.functions[name]
        if self.depth >= DEEPEST:
            raise self.refuse(node, f"{name} calls itself without end; is this the right file?")
        before = self.scope.arguments, self.source
        self.scope.arguments, self.source = tuple(arguments), source
        self.depth += 1
        self.statements([body])
        self.depth -= 1
        self.scope.arguments, self.source = before
        if self.scope.ended == "return":
            self.scope.ended = ""

    # Assignments

    def assignment(self, node: Node) -> None:
        """`NAME=value`, `NAME+=value`, `NAME=(...)`."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        if name.type == "subscript":
            self._element(name, value)
            return
        more = any(child.type == "+=" for child in node.children)
        said = self.source.said(name)
        given = self._value(value)
        self.scope.set(said, _added(self.scope.get(said), given) if more else given)

    def _element(self, name: Node, value: Node | None) -> None:
        """One element of an array: known where its place is a number."""
        text = self.source.said(name)
        variable, _, index = text.partition("[")
        given, before = self._value(value), self.scope.get(variable)
        elements = list(before.words) if before else []
        place = index.rstrip("]")
        if place.isdigit() and int(place) <= len(elements):
            elements[int(place) :] = [given.pieces, *elements[int(place) + 1 :]]
            self.scope.set(variable, Value(tuple(elements), True))
        else:
            spot = self.source.place(name.start_byte, name.end_byte)
            unknown = Unknown(f"${variable}", spot, self.line(name), "this form of assignment is not read")
            self.scope.set(variable, Value(((unknown,),), True))

    def _value(self, node: Node | None) -> Value:
        if node is None:
            return Value(((),))
        if node.type != "array":
            return Value((self.expander.text(node),))
        elements = (child for child in node.children if child.type not in ("(", ")", "comment"))
        return Value(tuple(word for element in elements for word in self.expander.words(element) if not _continues(word)), True)

    def assignments(self, node: Node) -> None:
        """Several on one line."""
        for child in node.children:
            if child.type == "variable_assignment":
                self.assignment(child)

    def declaration(self, node: Node) -> None:
        """`export`, `declare`, `local`, `readonly`."""
        for child in node.children:
            name = child.child_by_field_name("name") if child.type == "variable_assignment" else child
            if child.type == "variable_assignment":
                self.assignment(child)
            if name is not None and node.children[0].type == "export" and name.type == "variable_name":
                self.scope.exported.add(self.source.said(name))

    def counting(self, node: Node) -> None:
        """`((i++))`: what it changes is not known any more, unless it is `i = ...` of what is known."""
        for child in node.children:
            if child.type in ("postfix_expression", "binary_expression", "unary_expression"):
                names = [part for part in child.children if part.type in ("variable_name", "word")]
                if names and ("=" in self.source.said(child) or child.type != "binary_expression"):
                    name = self.source.said(names[0])
                    unknown = Unknown(
                        f"${name}", self.source.place(child.start_byte, child.end_byte), self.line(child), "it is counted"
                    )
                    self.scope.set(name, Value(((unknown,),)))

    def unset(self, node: Node) -> None:
        """`unset NAME`."""
        for child in node.children[1:]:
            self.scope.variables.pop(self.source.said(child), None)

    # Commands

    def redirected(self, node: Node) -> None:
        """A command with redirections: here-documents and `echo` may write a file that is used later."""
        body = node.child_by_field_name("body")
        if not self.branch:
            check_redirects(self.source, (part for part in node.children if part.type == "file_redirect"))
        if body is not None:
            self.statement(body)
        target, content = self._target(node), self._content(node, body)
        if target is not None and content is not None:
            self.scope.files[file_key(target)] = content
        if body is not None and body.type == "command" and content is not None:
            self._into_variable(body, content)

    def _target(self, node: Node) -> Pieces | None:
        redirects = [part for part in _all(node) if part.type == "file_redirect" and part.children[0].type in (">", ">|")]
        for redirect in redirects:
            destination = redirect.child_by_field_name("destination")
            if destination is not None:
                return self.expander.text(destination)
        body = node.child_by_field_name("body")
        called = self._called(body) if body is not None and body.type == "command" else []
        piped = [self._called(part) for part in _all(node) if part.type == "command"]
        tee = next((words for words in (called, *piped) if words and spelled(words[0]) == "tee"), None)
        return tee[-1] if tee and len(tee) > 1 else None

    def _content(self, node: Node, body: Node | None) -> Pieces | None:
        for part in _all(node):
            if part.type == "heredoc_body":
                return self._document(node, part)
        called = self._called(body) if body is not None and body.type == "command" else []
        if called and spelled(called[0]) == "echo":
            kept = [word for word in called[1:] if spelled(word) not in ("-e", "-n", "-E")]
            return tuple(piece for index, word in enumerate(kept) for piece in (*_blank(index, word), *word))
        return None

    def _document(self, node: Node, body: Node) -> Pieces:
        start = next((self.source.said(part) for part in _all(node) if part.type == "heredoc_start"), "")
        quoted = start[:1] in ("'", '"', "\\")
        end = body.end_byte
        if quoted:
            return tuple(self.source.literal(body.start_byte, end, "raw", True))
        pieces = self.expander.between(body, body.start_byte, end, "heredoc", True)
        return tuple(piece for piece in pieces if isinstance(piece, Text | Unknown))

    def _into_variable(self, body: Node, content: Pieces) -> None:
        """`read -r -d '' NAME <<EOF`."""
        called = self._called(body)
        if called and spelled(called[0]) == "read":
            self.scope.set(spelled(called[-1]), Value((content,)))

    def _called(self, node: Node) -> list[Pieces]:
        parts = (child for child in node.children if child.type not in ("variable_assignment", *REDIRECTS))
        return [word for child in parts for word in self.expander.words(child)]

    def command(self, node: Node) -> None:
        """A simple command: a function, one that the shell itself knows, or one that it starts."""
        called = self._called(node)
        if not called:
            return
        name = known(called[0]) or ""
        if name in self.scope.functions:
            self.call(node, name, called[1:])
        elif name in BUILTINS:
            BUILTINS[name](self, node, called)
        elif self._shell_inside(node, called):
            pass
        else:
            self._start(node, called)

    def _start(self, node: Node, called: Sequence[Pieces]) -> None:
        own = {}
        for child in node.children:
            if child.type == "variable_assignment" and (name := child.child_by_field_name("name")) is not None:
                own[self.source.said(name)] = self._value(child.child_by_field_name("value")).pieces
        exported = {name: value.pieces for name in sorted(self.scope.exported) if (value := self.scope.get(name))}
        self.commands.append(Command(tuple(called), {**exported, **own}, self.line(node), self.branch))

    def _shell_inside(self, node: Node, called: Sequence[Pieces]) -> bool:
        """`... bash -c 'text'`: the text is a script of its own, started by what stands before it."""
        texts = [known(word) for word in called]
        for index, text in enumerate(texts[:-2]):
            options = texts[index + 1] or ""
            if text in SHELLS and options.startswith("-") and options.endswith("c"):
                self._nested(node, called[index + 2], called[:index])
                return True
        return False

    def _nested(self, node: Node, text: Pieces, before: Sequence[Pieces] = ()) -> None:
        """Read text as shell; what it starts is started by the words `before`."""
        if self.depth >= DEEPEST:
            raise self.refuse(node, "a shell starts itself without end; is this the right file?")
        source = Source.of(text, self.source)
        first = len(self.commands)
        check_syntax(source)
        self.depth += 1
        self.run(source)
        self.depth -= 1
        line = self.line(node)
        self.commands[first:] = [replace(found, words=(*before, *found.words), line=line) for found in self.commands[first:]]

    def eval(self, node: Node, called: Sequence[Pieces]) -> None:
        """`eval TEXT`."""
        self._nested(node, tuple(piece for index, word in enumerate(called[1:]) for piece in (*_blank(index, word), *word)))

    def end(self, node: Node, called: Sequence[Pieces]) -> None:
        """`exit`, `return`, `break`, `continue`."""
        self.scope.ended = spelled(called[0])

    def take_file(self, node: Node, called: Sequence[Pieces]) -> None:
        """`source FILE`: what it sets is not known."""
        self.sourced.append((self.line(node), spelled(called[-1])))

    def ask(self, node: Node, called: Sequence[Pieces]) -> None:
        """`read NAME`: filled by a run."""
        for word in called[1:]:
            name = spelled(word)
            if name.isidentifier():
                self.scope.set(name, Value(((Unknown(f"${name}", NOWHERE, self.line(node), OUTPUT),),)))

    def shift(self, node: Node, called: Sequence[Pieces]) -> None:
        """`shift`."""
        if self.scope.arguments is not None:
            self.scope.arguments = self.scope.arguments[1:]

    def run_in_place(self, node: Node, called: Sequence[Pieces]) -> None:
        """`exec COMMAND`, `time COMMAND`: the command itself."""
        if len(called) > 1 and not self._shell_inside(node, called[1:]):
            self._start(node, called[1:])

    def silent(self, node: Node, called: Sequence[Pieces]) -> None:
        """What sets nothing and starts nothing."""


def _added(before: Value | None, more: Value) -> Value:
    if before is None:
        return more
    if before.array or more.array:
        return Value((*before.words, *more.words), True)
    return Value(((*before.pieces, *more.pieces),))


def _continues(word: Pieces) -> bool:
    """A stray backslash at the end of a line of an array."""
    return known(word) in ("\\", "") and not any(piece.quoted for piece in word)


def _blank(index: int, word: Pieces) -> Iterator[Piece]:
    if index:
        yield Text(" ", word[0].span if word else NOWHERE, True, plain=False)


def _all(node: Node) -> Iterator[Node]:
    """Redirections of a statement, those that the grammar hangs below a here-document too."""
    for child in node.children:
        if child.type in (*REDIRECTS, "pipeline", "command", "heredoc_body", "heredoc_start"):
            yield child
            if child.type in ("heredoc_redirect", "pipeline"):
                yield from _all(child)


def file_key(path: Pieces) -> str:
    """What makes two names of files the same, unknown parts included."""
    return "".join(piece.key for piece in path).removeprefix("./")


def _branches(node: Node) -> Iterator[tuple[Node | None, Sequence[Node]]]:
    """Conditions and bodies of an `if`, in order; the condition of `else` is None."""
    conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
    rest = [child for child in node.children if child.type not in ("elif_clause", "else_clause")]
    yield (conditions[-1] if conditions else node), _then(rest)
    for clause in node.children:
        if clause.type == "elif_clause":
            condition = next((child for child in clause.children if child.is_named), clause)
            yield condition, _then(clause.children)
        elif clause.type == "else_clause":
            yield None, clause.children[1:]


def _then(nodes: Sequence[Node]) -> Sequence[Node]:
    place = next((index for index, child in enumerate(nodes) if child.type == "then"), len(nodes))
    return nodes[place + 1 :]


def _case_body(item: Node) -> Sequence[Node]:
    place = next((index for index, child in enumerate(item.children) if child.type == ")"), 0)
    return item.children[place + 1 :]


REDIRECTS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
STATEMENTS: Mapping[str, Callable[[Reader, Node], None]] = {
    "program": Reader.block,
    "compound_statement": Reader.block,
    "do_group": Reader.block,
    "subshell": Reader.subshell,
    "pipeline": Reader.subshell,
    "if_statement": Reader.if_,
    "case_statement": Reader.case,
    "for_statement": Reader.loop,
    "c_style_for_statement": Reader.loop,
    "while_statement": Reader.loop,
    "list": Reader.list_,
    "function_definition": Reader.function,
    "variable_assignment": Reader.assignment,
    "variable_assignments": Reader.assignments,
    "declaration_command": Reader.declaration,
    "unset_command": Reader.unset,
    "redirected_statement": Reader.redirected,
    "command": Reader.command,
}
BUILTINS: Mapping[str, Callable[[Reader, Node, Sequence[Pieces]], None]] = {
    "eval": Reader.eval,
    **dict.fromkeys(("exit", "return", "break", "continue"), Reader.end),
    **dict.fromkeys(("source", "."), Reader.take_file),
    **dict.fromkeys(("read", "mapfile", "readarray"), Reader.ask),
    **dict.fromkeys(("exec", "time", "nohup", "command"), Reader.run_in_place),
    "shift": Reader.shift,
    **dict.fromkeys(
        ("echo", "printf", "set", "cd", "mkdir", "let", "test", ":", "true", "false", "trap", "ulimit", "wait"), Reader.silent
    ),
}
