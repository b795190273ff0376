"""Stand-ins for packages that SGLang imports everywhere and calls on GPUs or for images only. For tests on a CPU.

With this folder on PYTHONPATH, importing one of STAND_INS gives an empty module: its names can be imported, and raise
NotImplementedError when they are called. So SGLang's CPU engine (device="cpu", attention_backend="torch_native",
sampling_backend="pytorch") starts without its CUDA kernels. Nothing is computed here: whatever needs one of these
packages fails, and says which.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

STAND_INS = ("sgl_kernel", "torchvision", "decord", "av")
"""CUDA kernels; image transforms; two video readers."""

SUBMODULES = ("torchvision", "decord", "av")
"""Of these, `import torchvision.transforms` works as well. SGLang asks for sgl_kernel's to find out what it can do."""


class _StandIn(types.ModuleType):
    __version__ = "0.28.0"  # of the torchvision that goes with torch 2.13: releases are compared

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        where = f"{self.__name__}.{name}"
        if name[0].isupper():  # a class: to subclass, to compare with, or an enumeration
            return _Class(name, (), {"__module__": self.__name__})

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(
                f"{where} is not there: tests/sglang/cpu_shim stands in for it"
            )

        missing.__name__ = name
        return missing


class _Class(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, submodule = name.partition(".")
        if package not in STAND_INS or (submodule and package not in SUBMODULES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=package in SUBMODULES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


# After the others: a package that is installed wins.
sys.meta_path.append(_Finder())
