"""The files of the package, parsed once: their modules, names and nodes."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "fsdp_optim"
ROOT = Path(__file__).parents[2] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str:
    """`fsdp_optim.state.dicts.full` is on the floor `state`, `fsdp_optim.plan` on `plan`, fsdp_optim/__init__.py on ``."""
    return module.split(".")[1] if "." in module else ""


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes(tree: ast.AST, *, at_import: bool = False) -> Iterator[ast.AST]:
    """All nodes, with those that only type checkers see. `at_import`: only the nodes that run when the file is imported."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if at_import and (is_function or is_for_type_checkers(node)):
                continue
            yield node
            waiting.append(node)


@functools.cache
def nodes_of(file: Path, *, at_import: bool = False) -> list[ast.AST]:
    return list(nodes(tree_of(file), at_import=at_import))


def owner_of(node: ast.Attribute) -> str:
    """`torch.distributed` of `torch.distributed.send`; "" of what is no chain of names."""
    names: list[str] = []
    value = node.value
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return ".".join([value.id, *reversed(names)]) if isinstance(value, ast.Name) else ""


MODULES = {module_of(file): file for file in FILES}


@functools.cache
def imports(file: Path, *, at_import: bool = False) -> frozenset[str]:
    """Modules that a file imports, also for types alone, with the package's own ones by their full names."""
    return imports_among(nodes_of(file, at_import=at_import), file)


def imports_among(nodes: Iterable[ast.AST], file: Path) -> frozenset[str]:
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_of(file).split(".")
                package = package if file.name == "__init__.py" else package[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                full_name = f"{base}.{alias.name}"
                imported.add(full_name if full_name in MODULES else base)
    return frozenset(imported)
