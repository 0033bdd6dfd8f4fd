"""Objects of other modules by name, imported when they are first asked for, and plug-ins."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from serve_spec.core.errors import PluginError

T = TypeVar("T")

PLUGIN_GROUP = "serve_spec.plugins"
"""Entry points of this group are functions without arguments that register what a package adds."""


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

        Raises PluginError: the name means another object already.
        """
        taken = self._places.setdefault(name, place)
        if taken != place:
            raise PluginError(
                f"{self.kind} {name!r}: registered by {_package(taken)} ({taken}) and by "
                f"{_package(place)} ({place}); uninstall one of them"
            )

    def names(self) -> list[str]:
        """Return all names, in the order of their registration."""
        return [*self._places]

    def place(self, name: str) -> str:
        """Return where the object of a known name is, `package.module:attribute`."""
        return self._places[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def load(self, name: str) -> T:
        """Return the object of a known name.

        Raises PluginError: its module does not import, lacks it, or it lacks a hook.
        """
        place = self._places[name]
        package = _package(place)
        try:
            found = import_object(place)
        except PluginError as error:
            fix = f"install a version of {package} that fits, or uninstall it"
            raise PluginError(f"{self.kind} {name!r}: {error}; {fix}") from error
        missing = [hook for hook in self._hooks if not hasattr(found, hook)]
        if missing:
            fix = f"use a version of {package} that defines it"
            why = f"{place} lacks {', '.join(missing)}"
            raise PluginError(f"{self.kind} {name!r}: {why}; {fix}")
        return cast(T, found)


def import_object(place: str) -> Any:
    """Return the object at `place`, `package.module:attribute`.

    Raises PluginError, a clause without a remedy: its module does not import, or lacks it.
    """
    module, _, attribute = place.partition(":")
    try:
        found = import_module(module)
    except Exception as error:  # an import runs the module's code
        raise PluginError(f"{module} does not import ({one_line(error)})") from error
    if not hasattr(found, attribute):
        raise PluginError(f"{module} has no {attribute}")
    return getattr(found, attribute)


@cache
def load_plugins() -> None:
    """Call the entry points of `PLUGIN_GROUP`, once in a process.

    Raises PluginError, one line that names the package: one does not load, fails, or registers a
    name that is taken.
    """
    for entry in entry_points(group=PLUGIN_GROUP):
        package = _package(entry.value) if entry.dist is None else entry.dist.name
        fix = f"install a version of {package} that fits, or uninstall it"
        try:
            entry.load()()
        except PluginError:
            raise
        except Exception as error:  # it runs the package's code
            what = f"plug-in {entry.name!r} of {package}: {entry.value} fails"
            raise PluginError(f"{what} ({one_line(error)}); {fix}") from error


def one_line(error: Exception) -> str:
    """Return type and message of an error, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _package(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]
