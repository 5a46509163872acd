"""What a function does, read from its source: the only way to know before it runs. Where there is no source, nothing
is known, and everything asked here is answered with no.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


Function = Callable[..., Any] | None


def source_of(function: Function) -> str:
    """Source of a function, decorators looked through; empty if there is none."""
    try:
        return inspect.getsource(inspect.unwrap(function)) if function is not None else ""
    except (OSError, TypeError):
        return ""


def takes_shift_labels(function: Function) -> bool:
    """Whether a function has a parameter `shift_labels`, or takes the key out of its keywords. A variable of that name
    is how losses shift labels themselves."""
    return any(
        (isinstance(node, ast.arg) and node.arg == "shift_labels")
        or (isinstance(node, ast.Constant) and node.value == "shift_labels")
        for node in _nodes(function)
    )


def passes_keywords_on(function: Function, name: str) -> bool:
    """Whether a method calls `self.name(..., **keywords)`."""
    calls = (node for node in _nodes(function) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == name
        and any(keyword.arg is None for keyword in call.keywords)
        for call in calls
    )


def calls_super(function: Function, name: str) -> bool:
    """Whether a method calls `super().name(...)`."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in _nodes(function)
    )


def _nodes(function: Function) -> Iterator[ast.AST]:
    """All nodes of a function's syntax tree."""
    return ast.walk(ast.parse(textwrap.dedent(source_of(function))))
