"""What the docstrings of a manifest dataclass say: of the class, and under each field that says more than its type.

Python keeps no docstring of a field, so that they are read from the source; only the generators of the CRD and of the
reference do, never a pass.
"""

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise


def class_description(cls: type) -> str:
    """The first paragraph, on one line."""
    return _one_line((inspect.getdoc(cls) or "").partition("\n\n")[0])


@cache
def field_descriptions(cls: type) -> dict[str, str]:
    """By the field's Python name; fields that say nothing themselves are left out."""
    body = _class_body(cls)
    return {
        field.target.id: _one_line(said.value.value)
        for field, said in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
    }


def _class_body(cls: type) -> list[ast.stmt]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _one_line(text: str) -> str:
    return " ".join(text.split())
