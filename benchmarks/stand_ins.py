"""Empty modules for packages that a framework imports and that the step at hand does not use."""

import importlib.machinery
import types
from typing import Any


class Empty(type):
    """A class whose attributes are such classes, and whose instances take any arguments and keep none."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, made := Empty(name, (), {"__init__": lambda self, *args, **kwargs: None}))
        return made


class StandIn(types.ModuleType):
    """A module in which every name is such a class."""

    __path__: list[str] = []  # noqa: RUF012
    __getattr__ = Empty.__getattr__


class StandIns:
    """Finds a stand-in for each of `names` that is not installed, when it is the last of `sys.meta_path`.

    Attributes:
      used: the names that were imported and not found elsewhere.

    Example:
      >>> import sys
      >>> sys.meta_path.append(stand_ins := StandIns("no_such_package"))
      >>> from no_such_package.part import Thing
      >>> sorted(stand_ins.used)
      ['no_such_package']
    """

    def __init__(self, *names: str):
        self.names, self.used = names, set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = next((each for each in self.names if f"{name}.".startswith(f"{each}.")), None)
        if found is None:
            return None
        self.used.add(found)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
