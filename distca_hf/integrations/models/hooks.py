"""Hooks of an enabled model. Copies of the model share them; a stored one comes back without its method, and does
nothing."""

from collections.abc import Callable

from distca_hf.torch_private import hidden_from_dynamo


# Attribute of an enabled model, and of the Transformers model inside it, that holds its `ForwardWatch`.
WATCH = "_distca_watch"


class Hook:
    """A hook that calls a method, and that a compiler may look into."""

    def __init__(self, method: Callable[..., object] | None = None) -> None:
        self._method = method

    def __call__(self, *arguments: object) -> object:
        return None if self._method is None else self._method(*arguments)

    def __deepcopy__(self, memo: dict[int, object]) -> "Hook":
        return self

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return type(self), ()


class HiddenHook(Hook):
    """A hook that no compiler looks into."""

    @hidden_from_dynamo
    def __call__(self, *arguments: object) -> object:
        return super().__call__(*arguments)
