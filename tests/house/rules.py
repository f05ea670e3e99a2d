"""The rules of the house as functions from source text to a list of violations, so that each can be shown to fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_lite"
# A package imports only from packages before it (docs/design.md says the same; a test compares the two).
ORDER = (
    *("errors", "config", "ops", "parallel", "models", "pipeline", "optim", "data", "checkpoint", "hf"),
    *("plan", "monitor", "runtime", "train"),
)
ENVIRONMENT_READERS = ("megatron_lite/runtime/launch.py", "megatron_lite/monitor/sinks.py")
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse"),
    *("setdefault", "sort", "update", "__setitem__", "__delitem__"),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Import:
    """One import statement's target: the dotted module, or module.name for `from module import name`."""

    target: str
    line: int


def parts(path: Path) -> tuple[str, ...]:
    """('megatron_lite', 'data', 'loader') for the file of that module; a package's __init__ is the package."""
    names = path.relative_to(ROOT).with_suffix("").parts
    return names[:-1] if names[-1] == "__init__" else names


def imports(source: str, module: tuple[str, ...], is_package: bool = False) -> list[Import]:
    """Every import of a module, those inside functions included, relative ones resolved."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if is_package else module[:-1]
                base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
            found += [Import(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return sorted(found, key=lambda item: item.line)


def out_of_order(source: str, module: tuple[str, ...], is_package: bool = False) -> list[str]:
    """Imports from a package that comes later in ORDER, from tools, or from a package that ORDER does not know."""
    mine = module[1] if len(module) > 1 else None  # None: the package's own __init__, which imports nothing of it
    if mine is not None and mine not in ORDER:
        return [f"{'.'.join(module)}: {mine} has no place in the import order"]
    wrong = []
    for item in imports(source, module, is_package):
        names = item.target.split(".")
        if names[0] in ("tools", "pretrain", "tests"):
            wrong.append(f"{'.'.join(module)}:{item.line} imports {item.target}, which stands outside the package")
        if names[0] != PACKAGE or len(names) < 2 or names[1] == "__version__":
            continue
        if names[1] not in ORDER:
            wrong.append(f"{'.'.join(module)}:{item.line} imports {item.target}, which has no place in the order")
        elif mine is None or ORDER.index(names[1]) > ORDER.index(mine):
            wrong.append(f"{'.'.join(module)}:{item.line} imports {item.target}, which comes later in the order")
    return wrong


def import_graph(sources: dict[tuple[str, ...], tuple[str, bool]]) -> dict[str, set[str]]:
    """Module -> modules of the same set that it imports; sources maps a module to (text, is it an __init__)."""
    names = {".".join(module) for module in sources}
    graph: dict[str, set[str]] = {}
    for module, (text, is_package) in sources.items():
        me = ".".join(module)
        graph[me] = set()
        for item in imports(text, module, is_package):
            target = item.target if item.target in names else item.target.rpartition(".")[0]
            if target in names and target != me:
                graph[me].add(target)
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of one circle of imports, in order, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph[node]):
            if found := visit(target, [*path, node]):
                return found
        done.add(node)
        return []

    for node in sorted(graph):
        if found := visit(node, []):
            return found
    return []


def _root_name(node: ast.AST) -> str | None:
    """`a` of a.b[c].d, or None when the chain does not start at a plain name."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _bound_names(body: list[ast.stmt]) -> dict[str, str]:
    """Names bound by statements -> 'import', 'class', 'function' or 'value'; functions and classes are not entered."""
    names: dict[str, str] = {}
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0]: "import" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            names[node.name] = "class"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = "function"
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names[inner.id] = "value"
                elif isinstance(inner, (ast.Import, ast.ImportFrom)):
                    names |= {(alias.asname or alias.name).split(".")[0]: "import" for alias in inner.names}
    return names


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Names that a function binds itself: parameters, assignments, loops, imports, inner functions."""
    args = function.args
    names = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a}
    body = function.body if isinstance(function.body, list) else [function.body]
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
                names.add(node.name or "")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def _in_functions(tree: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Every node inside some function, with the names that are local there."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, FUNCTIONS):
            inner = local | _local_names(child)
            for node in ast.walk(child):
                if not isinstance(node, FUNCTIONS) and node is not child:
                    yield node, inner
            yield from _in_functions(child, inner)
        else:
            yield from _in_functions(child, local)


def shared_state(source: str) -> list[str]:
    """`global`, and changes from inside a function to a module-level value, class or imported module."""
    tree = ast.parse(source)
    module_names = _bound_names(tree.body)
    wrong = {f"line {n.lineno}: global {', '.join(n.names)}" for n in ast.walk(tree) if isinstance(n, ast.Global)}
    for node, local in _in_functions(tree):
        shared = set(module_names) - local
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        for target in targets:
            for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                if isinstance(part, (ast.Attribute, ast.Subscript)) and _root_name(part) in shared:
                    wrong.add(f"line {node.lineno}: changes {ast.unparse(part)}, which outlives the call")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            root = _root_name(node.func.value)
            if root in shared and module_names[root] in ("value", "class"):
                wrong.add(f"line {node.lineno}: {ast.unparse(node.func)}() changes what outlives the call")
    return sorted(wrong)


def runs_at_import(source: str) -> list[str]:
    """Module-level statements that do something other than define: calls, loops, changes to what was defined."""
    wrong = []

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.If):
                if "__main__" not in ast.unparse(node.test):
                    visit([*node.body, *node.orelse])
            elif isinstance(node, ast.Try):  # an optional import
                visit([*node.body, *(s for h in node.handlers for s in h.body), *node.orelse, *node.finalbody])
            elif isinstance(node, ast.Expr):
                if not isinstance(node.value, ast.Constant):
                    wrong.append(f"line {node.lineno}: {ast.unparse(node)} runs at import")
            elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(node, ast.AugAssign) or not isinstance(target, (ast.Name, ast.Tuple)):
                        wrong.append(f"line {node.lineno}: {ast.unparse(node)} changes something at import")
            elif isinstance(node, (ast.For, ast.While, ast.With, ast.Delete, ast.Match)):
                wrong.append(f"line {node.lineno}: a {type(node).__name__.lower()} statement runs at import")

    visit(ast.parse(source).body)
    return wrong


def environment_reads(source: str) -> list[str]:
    """Uses of os.environ and os.getenv under any name; `os.environ[NAME] = value` is no read (shared_state sees it)."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    tree = ast.parse(source)
    stores = {n.value for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and node not in stores:
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            wrong += [f"line {node.lineno}: from os import {a.name}" for a in node.names if a.name in names]
    return wrong


def broad_excepts(source: str) -> list[str]:
    """`except:`, `except Exception` and `except BaseException` whose handler does not raise."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(
                k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException")) for k in kinds
            )
            if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                wrong.append(f"line {node.lineno}: catches everything and goes on")
    return wrong


def top_level_imports(source: str) -> set[str]:
    """First names of all absolute imports: 'torch' for `from torch.nn import functional`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def package_files() -> list[Path]:
    """Every module of the package, in order."""
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def program_files() -> list[Path]:
    """Every module of the package, the tools, the examples and pretrain.py."""
    programs = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), ROOT / "pretrain.py"]
    return [*package_files(), *sorted(path for path in programs if path.is_file())]
