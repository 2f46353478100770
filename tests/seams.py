"""What a test file reaches that no caller can: private names of ours, and our own modules and classes patched.

Such a test says how the code is written, not what it does, and fails when the code is written better.
"""

import ast
from collections.abc import Iterator

OURS = ("kvasir_chat", "kvasir_http", "kvasir_logging", "kvasir_runtime", "kvasir_router", "kvasir_operator")
PATCHES = ("setattr", "delattr", "setitem", "delitem", "patch", "object")


def reaches(source: str) -> Iterator[tuple[int, str]]:
    """Lines and what stands there, for one test file's source."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if is_ours(node.module or "" if isinstance(node, ast.ImportFrom) else alias.name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            yield from ((node.lineno, f"imports {alias.name}") for alias in node.names if is_private(alias.name))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and name_under(node.value) not in ("self", "cls"):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PATCHES:
            patched, *rest = [*node.args, None]
            if is_ours(string(patched)) or name_under(patched) in imported or is_private(string(rest[0])):
                yield node.lineno, ast.unparse(node)


def is_ours(module: str) -> bool:
    return module.split(".")[0] in OURS


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def name_under(expression: ast.expr | None) -> str | None:
    """The name that a chain of attributes and calls begins with: `a` of `a.b().c`."""
    while isinstance(expression, ast.Attribute | ast.Call):
        expression = expression.value if isinstance(expression, ast.Attribute) else expression.func
    return expression.id if isinstance(expression, ast.Name) else None


def string(expression: ast.expr | None) -> str:
    """A literal's text, or nothing."""
    return expression.value if isinstance(expression, ast.Constant) and isinstance(expression.value, str) else ""
