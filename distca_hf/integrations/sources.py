"""What a function does, read from its source: the only way to know before it runs. Empty where there is no source."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def takes_shift_labels(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `shift_labels`, or takes the key out of its keywords. A variable of that name
    is how losses shift labels themselves."""
    return any(
        (isinstance(node, ast.arg) and node.arg == "shift_labels")
        or (isinstance(node, ast.Constant) and node.value == "shift_labels")
        for node in nodes_of(function)
    )


def calls_super(function: Callable[..., Any], name: str) -> bool:
    """Whether a method calls `super().name(...)`."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in nodes_of(function)
    )


def nodes_of(function: Callable[..., Any]) -> Iterator[ast.AST]:
    """All nodes of a function's syntax tree, decorators looked through."""
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return
    yield from ast.walk(ast.parse(textwrap.dedent(source)))
