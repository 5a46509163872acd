"""What `help()` shows of settings: a description of each, and a signature with the defaults.

Defaults of settings come from a factory, because the environment may change them. Python shows such a default as
`<factory>`, and the descriptions nowhere.
"""

import dataclasses
import inspect
import textwrap


LINE_WIDTH = 100


def describe_settings(settings: type) -> str:
    """Returns the docstring of a dataclass of settings, followed by each of them: name, type, default, description."""
    described = "\n".join(
        f"{field.name} ({_name(field.type)}, default {field.metadata['default']!r}):\n"
        + textwrap.indent(textwrap.fill(field.metadata["help"], LINE_WIDTH), "    ")
        for field in dataclasses.fields(settings)
    )
    return f"{inspect.getdoc(settings) or ''}\n\nSettings:\n{textwrap.indent(described, '    ')}\n"


def signature_of_settings(settings: type) -> inspect.Signature:
    """Returns the signature of a dataclass of settings, with their own defaults in place of factories."""
    return inspect.Signature(
        [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.metadata["default"], annotation=field.type
            )
            for field in dataclasses.fields(settings)
        ]
    )


def _name(kind: object) -> str:
    choices = getattr(kind, "__args__", ())
    return " | ".join(map(repr, choices)) if choices else getattr(kind, "__name__", str(kind))
