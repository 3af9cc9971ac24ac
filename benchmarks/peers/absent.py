"""Stand-ins for packages that a vendored peer imports and this workload never calls."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class Empty(ModuleType):
    """Has every name; whatever is made of one refuses to be."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise ImportError(f"{self.__name__}.{name} is not installed")

        return type(name, (), {"__init__": refuse})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the given packages where nobody else does."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None):  # noqa: ARG002
        known = name.split(".", maxsplit=1)[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def allow(*names: str) -> None:
    """From now on, packages of these names can be imported even where they are not installed."""
    sys.meta_path.append(Finder(names))
