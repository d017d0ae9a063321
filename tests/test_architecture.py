"""The house: which part may import which, held on the syntax trees of the whole package."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import bridge
import compat

ROOTS = {"bridge": Path(bridge.__file__).parent, "compat": Path(compat.__file__).parent}
LAYERS = ("plan", "layout", "comm", "trace", "engine")
"""Each may import those before it, never those after it."""
HEAVY = (
    *("torch", "numpy", "deepspeed", "megatron", "transformers", "rich", "typer", "hypothesis"),
    *("ruamel", "yaml", "hjson"),
)
"""What a config is read, checked and converted without, until the function that needs it runs."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for root, folder in ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((root, *(part for part in parts if part != "__init__")))] = path
    return found


def imports(name: str, *, at_load: bool) -> set[str]:
    """Modules of ours that `name` imports: all of them, or those that loading it imports."""
    tree = _tree(name)
    return {
        module
        for node in (_loading(tree) if at_load else ast.walk(tree))
        for module in _imported(node)
    } - {name}


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def _loading(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not typing_only and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            yield node
            yield from _loading(node)


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in modules() else str(node.module) for name in inner]
    else:
        return
    yield from (name for name in names if name in modules())


def part(module: str) -> str:
    """The layer or the dialect that a module belongs to. The engine's collectives are a layer of their own, as traces
    use them.
    """
    if module == "bridge.engine.comm":
        return "comm"
    return module.split(".")[1] if "." in module else ""


def everyone(test: Callable[..., None]) -> Callable[..., None]:
    """For every module; what its text says is the same on every Python."""
    marked: Callable[..., None] = pytest.mark.once(
        pytest.mark.parametrize("module", sorted(modules()))(test)
    )
    return marked


def test_modules_are_found() -> None:
    assert {"bridge.plan", "bridge.files.yaml", "bridge.cli.app", "compat"} <= set(modules())
    assert len(imports("bridge.cli.convert", at_load=True)) >= 5


@everyone
def test_the_core_knows_no_stack(module: str) -> None:
    if module.startswith("bridge"):
        assert not [
            name for name in imports(module, at_load=False) if name.split(".")[0] == "compat"
        ]


@everyone
def test_torch_stays_in_the_runtime_of_a_stack(module: str) -> None:
    """What a config is read and translated with does not know what runs it; entry points load that by its name."""
    if module.startswith("compat.") and ".runtime" not in module:
        loading = (node for node in _loading(_tree(module)) if isinstance(node, ast.Import))
        used = {alias.name.split(".")[0] for node in loading for alias in node.names}
        assert not used & {"torch", "deepspeed"}
        assert not [
            name
            for name in imports(module, at_load=False)
            if ".runtime" in name or name.startswith("bridge.engine")
        ]


@everyone
def test_no_dialect_knows_another(module: str) -> None:
    if module.startswith("compat."):
        known = {name for name in imports(module, at_load=False) if name.startswith("compat")}
        assert {part(name) for name in known} <= {part(module)}


@everyone
def test_only_what_generates_configs_imports_hypothesis_or_what_does(module: str) -> None:
    """Hypothesis comes with the extra `test` alone; no other part may need it, at load or later."""
    if (
        not module.startswith("bridge.testing")
        and module != "bridge.cli.fuzz"
        and not module.endswith(".strategies")
    ):
        assert not [
            name for name in imports(module, at_load=False) if name.startswith("bridge.testing")
        ]
        assert "hypothesis" not in {name.split(".")[0] for name in _outside(module)}


def _outside(module: str) -> Iterator[str]:
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@everyone
def test_layers_import_downwards(module: str) -> None:
    if module.startswith("bridge.") and part(module) in LAYERS:
        above = LAYERS[LAYERS.index(part(module)) + 1 :]
        assert not [
            name
            for name in imports(module, at_load=False)
            if name.startswith("bridge.") and part(name) in above
        ]


@everyone
def test_nothing_imports_the_command_line(module: str) -> None:
    if part(module) != "cli":
        assert not [
            name for name in imports(module, at_load=False) if name.startswith("bridge.cli")
        ]


REFUSALS = ("ConfigError", "SourceError", "UnrecognisedError")
"""Errors of which each says that a config is not valid or not readable."""
NO_CONFIG = (".runtime", "megatron.checkpoint", ".strategies", ".releases")
"""Parts of a stack's folder that read no config of a user."""


def refuses(module: str) -> bool:
    """Whether a module makes such an error, or calls what raises one: `raise_if` of its class, `unless` of a reading."""
    calls = (node.func for node in ast.walk(_tree(module)) if isinstance(node, ast.Call))
    made = (
        ast.unparse(function).removesuffix(".raise_if").rpartition(".")[2] for function in calls
    )
    return any(name in (*REFUSALS, "unless") for name in made)


@pytest.mark.once
def test_a_config_of_megatron_is_refused_by_rows_of_checks_or_by_the_reader() -> None:
    """A condition on settings is a row, which `run` evaluates; a value without a meaning is refused by `read`."""
    sides = [
        name
        for name in modules()
        if name.startswith("compat.megatron") and not any(aside in name for aside in NO_CONFIG)
    ]
    assert {name for name in sides if refuses(name)} == {
        "compat.megatron.arguments.evaluation",
        "compat.megatron.formats",
    }


@pytest.mark.once
def test_no_cycles() -> None:
    graph = {name: imports(name, at_load=True) for name in modules()}
    assert list(TopologicalSorter(graph).static_order())


def dependencies() -> dict[str, set[str]]:
    """What each module imports anywhere, for types and inside functions too. Packages do not count: they are faces."""
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    return {name: imports(name, at_load=False) - packages for name in modules()}


MOST_FLOORS = 23
"""Longest chain of modules of which each imports the next."""
MOST_LATE = 125
"""Most imports of our own inside functions. One more has to be worth the start that it saves."""


@pytest.mark.once
def test_no_cycles_of_types_and_late_imports() -> None:
    graph = dependencies()
    floors: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        floors[name] = 1 + max((floors[other] for other in graph[name]), default=0)
    assert max(floors.values()) <= MOST_FLOORS, max(floors, key=lambda name: floors[name])


@pytest.mark.once
def test_imports_of_our_own_stand_at_the_top() -> None:
    late = {
        (name, node.lineno, module)
        for name in modules()
        for function in ast.walk(_tree(name))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for module in _imported(node)
    }
    assert len(late) <= MOST_LATE


IRREGULAR = frozenset(
    re.findall(
        r"\w+",
        "told said held kept seen known found given meant written drawn taken shown spelt left lost made sent spent"
        " built bound begun driven dealt led thrown gone done",
    )
)
"""Past participles that do not end in -ed."""
NO_PARTICIPLE = {"need", "seed", "embed", "speed", "feed", "indeed", "hundred", "shed", "breed"}


def is_participle(name: str) -> bool:
    """Whether a name is a past participle alone, which says that something was done and not what the thing is."""
    word = name.strip("_")
    regular = word.endswith("ed") and len(word) > 4 and word not in NO_PARTICIPLE
    return "_" not in word and (regular or word in IRREGULAR)


def test_participles_are_seen() -> None:
    assert all(map(is_participle, ("found", "_parsed", "held", "sharded")))
    assert not any(map(is_participle, ("seed", "read_launch", "found_rows", "rows", "need")))


@pytest.mark.once
@pytest.mark.parametrize("top", ROOTS)
def test_names_say_what_things_are(top: str) -> None:
    """A function is a verb with its object or a noun, a variable is what it holds."""
    functions, variables, at_the_top = list[str](), list[str](), list[str]()
    for name in modules():
        tree = _tree(name)
        for node in ast.walk(tree) if name.split(".")[0] == top else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(node.name)
                at_the_top += [node.name] if node in tree.body else []
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                variables.append(node.id)
            elif isinstance(node, ast.arg):
                variables.append(node.arg)
    one_word = [name for name in at_the_top if "_" not in name.strip("_")]
    assert sum(map(is_participle, functions)) <= 0.01 * len(functions)
    assert sum(map(is_participle, variables)) <= 0.02 * len(variables)
    assert len(one_word) <= 0.5 * len(at_the_top)


@everyone
def test_modules_open_with_one_sentence(module: str) -> None:
    doc = ast.get_docstring(ast.parse(modules()[module].read_text(encoding="utf-8")))
    assert doc, "no docstring"
    assert doc.split("\n\n")[0].rstrip().endswith((".", ":")), doc


@everyone
def test_names_say_what_is_inside(module: str) -> None:
    assert not {"utils", "util", "helpers", "common", "manager"} & set(module.split("."))


def loaded(code: str) -> set[str]:
    """Top-level names of what a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    environment = {**os.environ, "PYTHONPATH": str(ROOTS["bridge"].parent)}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_heavy_modules_would_be_seen() -> None:
    assert "rich" in loaded("import rich.console")
    assert find_spec("rich") and find_spec("ruamel.yaml") and find_spec("typer")


@pytest.mark.parametrize("name", compat.names())
def test_loading_a_dialect_is_light(name: str) -> None:
    light = loaded(
        f"import bridge, compat; compat.load({name!r}).rules; compat.load({name!r}).schema"
    )
    assert not light & set(HEAVY)


def test_importing_the_package_is_light() -> None:
    assert not loaded(
        "import bridge, compat, bridge.files, bridge.plan, bridge.translation.translate, bridge.report.as_json"
    ) & set(HEAVY)
    assert "pydantic" not in loaded("import bridge")


def test_help_loads_no_stack() -> None:
    code = "import sys\nfrom bridge.cli import run\nrun(['convert', '--help'])"
    light = loaded(code)
    assert not light & (set(HEAVY) - {"typer", "rich"})
    assert "compat" not in light
    assert not loaded(code.replace("'convert', ", "")) & {*HEAVY, "compat", "pydantic"} - {
        "typer",
        "rich",
    }


def test_converting_needs_no_torch() -> None:
    code = "from bridge.cli import run\nimport tempfile\nassert run(['demo', '--no-train', '-o', tempfile.mkdtemp()]) == 0"
    assert not loaded(code) & {"torch", "deepspeed", "megatron", "numpy", "transformers"}
