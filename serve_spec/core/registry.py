"""Registries: names, each with the place of what it names, imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from serve_spec.core.errors import PluginError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name.

    kind: what they are, for errors. hooks: attributes that each must have.
    """

    def __init__(self, kind: str, hooks: Iterable[str] = ()) -> None:
        self.kind = kind
        self._hooks = tuple(hooks)
        self._places: dict[str, str] = {}

    def add(self, name: str, place: str) -> None:
        """Let `name` mean the object at `place`, `package.module:attribute`.

        Raises PluginError: the name already means another object.
        """
        taken = self._places.setdefault(name, place)
        if taken != place:
            raise PluginError(
                f"{self.kind} {name!r}: registered by {_package(taken)} ({taken}) and by "
                f"{_package(place)} ({place}); uninstall one of them"
            )

    def remove(self, name: str) -> None:
        """Forget a name, if it is known."""
        self._places.pop(name, None)

    def names(self) -> list[str]:
        """Return all names, in the order of their registration."""
        return [*self._places]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def place(self, name: str) -> str:
        """Return where the object of a known name is."""
        return self._places[name]

    def load(self, name: str) -> T:
        """Return the object of a known name.

        Raises PluginError: its module cannot be imported, lacks it, or it lacks a hook.
        """
        what = f"{self.kind} {name!r}"
        return cast(T, load_object(self._places[name], what, self._hooks))


def load_object(place: str, what: str, hooks: Iterable[str] = ()) -> Any:
    """Return the object at `place`, `package.module:attribute`.

    what: how errors name it. hooks: attributes that it must have. Raises PluginError.
    """
    module, _, attribute = place.partition(":")
    package = _package(place)
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module of a plug-in may raise anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = f"install a version of {package} that fits, or uninstall it"
        raise PluginError(f"{what}: {place} does not load ({why}); {fix}") from error
    missing = [hook for hook in hooks if not hasattr(found, hook)]
    if missing:
        fix = f"use a version of {package} that defines it"
        raise PluginError(f"{what}: {place} lacks {', '.join(missing)}; {fix}")
    return found


def _package(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]
