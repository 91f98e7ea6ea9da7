"""A hash of a kernel's source that changes when the kernel changes, and only then.

Tables store it, so it must not depend on the Python that computes it: the tree is written out by this file, not
by ``ast.dump``, whose text differs between versions (3.12 adds type_params, 3.13 leaves empty lists out).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# `kind` is the u of u"..."; `ctx` follows from where an expression stands.
_FORMATTING = frozenset({"kind", "ctx", "type_comment", "type_ignores"})


@functools.cache
def source_hash(kernel: str) -> str:
    """sha256 over the syntax trees of a kernel's module and of what it imports relatively, transitively.

    Comments, docstrings, positions and formatting do not count; names, constants and statements do. No module
    is imported, not even the kernel's. Remembered for the process; ``source_hash.cache_clear()`` forgets.

    Args:
        kernel: ``module:function``, for example ``tritonops.norm.rows_forward:norm_forward_rows_kernel``. The
            whole module counts, whichever of its functions is named.

    Raises:
        ModuleNotFoundError: there is no source file for the module or for one that it imports relatively.
        SyntaxError: a source file does not parse.
    """
    pending, trees = [kernel.partition(":")[0]], {}
    while pending:
        module = pending.pop()
        if module in trees:
            continue
        path = _find(module)
        tree = ast.parse(path.read_text(encoding="utf-8-sig"), filename=str(path))
        trees[module] = _write(tree)
        pending += _relative_imports(tree, module, path.name == "__init__.py")
    digest = hashlib.sha256()
    for module in sorted(trees):
        digest.update(f"{module}\n{trees[module]}\n".encode())
    return digest.hexdigest()


@functools.cache
def _roots(package: str) -> tuple[Path, ...]:
    """Directories of a top-level package, or the directory of a top-level module."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"source_hash: no package {package!r}", name=package)
    if spec.submodule_search_locations is not None:
        return tuple(Path(p) for p in spec.submodule_search_locations)
    return ()


def _find_or_none(module: str) -> Path | None:
    package, _, rest = module.partition(".")
    if not rest:
        spec = importlib.util.find_spec(package)
        origin = Path(spec.origin) if spec is not None and spec.origin else None
        return origin if origin is not None and origin.suffix == ".py" else None
    for root in _roots(package):
        base = root.joinpath(*rest.split("."))
        for path in (base / "__init__.py", base.with_name(base.name + ".py")):
            if path.is_file():
                return path
    return None


def _find(module: str) -> Path:
    path = _find_or_none(module)
    if path is None:
        raise ModuleNotFoundError(f"source_hash: no source file for module {module!r}", name=module)
    return path


def _relative_imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        if not parts:
            raise ModuleNotFoundError(
                f"source_hash: {module}:{node.lineno} imports from above its package", name=module
            )
        base = ".".join(parts + ([node.module] if node.module else []))
        for name in node.names:
            submodule = f"{base}.{name.name}"
            yield submodule if name.name != "*" and _find_or_none(submodule) else base


def _write(node: object) -> str:
    """One text for one tree: absent and empty fields are left out, so that fields which a Python adds do not show."""
    if isinstance(node, ast.Constant):
        return f"Constant({ascii(node.value)})"
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({','.join(_pieces(node))})"
    if isinstance(node, ast.AST):
        fields = []
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name == "body" and isinstance(node, _DOCUMENTED):
                value = _without_docstring(node)
            if value is None or value == [] or name in _FORMATTING:
                continue
            fields.append(f"{name}={_write(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_write, node))}]"
    return ascii(node)


def _without_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    first = node.body[0] if node.body else None
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return node.body[1:] if documented else node.body


def _pieces(node: ast.JoinedStr) -> Iterator[str]:
    """The parts of an f-string, adjacent literals joined: how a literal is cut differs between versions."""
    literal = ""
    for value in node.values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            literal += value.value
            continue
        if literal:
            yield ascii(literal)
            literal = ""
        yield _write(value)
    if literal:
        yield ascii(literal)
