"""Source inspection: properties of a function that are known only from its source before it runs. Without a source
every answer is no.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator


Function = Callable[..., object] | None


def source_of(function: Function) -> str:
    """Returns the source of a function, without its decorators; empty if there is none."""
    try:
        return inspect.getsource(inspect.unwrap(function)) if function is not None else ""
    except (OSError, TypeError):
        return ""


def takes_shift_labels(function: Function) -> bool:
    """Returns whether a function has a parameter `shift_labels`, or takes the key out of its keywords. Losses that
    shift labels themselves have a variable of that name."""
    return any(
        (isinstance(node, ast.arg) and node.arg == "shift_labels")
        or (isinstance(node, ast.Constant) and node.value == "shift_labels")
        for node in _nodes(function)
    )


def passes_keywords_on(function: Function, name: str) -> bool:
    """Returns whether a method calls `self.name(..., **keywords)`."""
    calls = (node for node in _nodes(function) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == name
        and any(keyword.arg is None for keyword in call.keywords)
        for call in calls
    )


def calls_super(function: Function, name: str) -> bool:
    """Returns whether a method calls `super().name(...)`."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in _nodes(function)
    )


def _nodes(function: Function) -> Iterator[ast.AST]:
    """Returns all nodes of a function's syntax tree."""
    return ast.walk(ast.parse(textwrap.dedent(source_of(function))))
