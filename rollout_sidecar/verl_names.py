"""verl's module names for users' own code: `from verl.tools.base_tool import BaseTool` works without verl.

A finder at the end of sys.meta_path makes the modules of the table below, whose names lead to ours. It only sees what
no other finder found: where verl is installed its own modules are used, and ours stand in for those that its newer
releases removed. It is put there by whoever loads users' code (`import_user_object`, `load_user_file`), never by an
import of ours.
"""

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCHEMAS = "rollout_sidecar.tools.schemas"
_SAMPLERS = "rollout_sidecar.verl_samplers"

MODULES: dict[str, dict[str, str]] = {
    "verl": {"DataProto": f"{_SAMPLERS}:DataProto"},
    "verl.protocol": {"DataProto": f"{_SAMPLERS}:DataProto"},
    "verl.experimental": {},
    "verl.experimental.dataset": {},
    "verl.experimental.dataset.sampler": {
        "AbstractSampler": f"{_SAMPLERS}:AbstractSampler",
        "AbstractCurriculumSampler": f"{_SAMPLERS}:AbstractCurriculumSampler",
    },
    "verl.tools": {},
    "verl.tools.base_tool": {
        "BaseTool": "rollout_sidecar.tools.base:BaseTool",
        "ToolResponse": "rollout_sidecar.tools.base:ToolResponse",
        "OpenAIFunctionToolSchema": f"{_SCHEMAS}:OpenAIFunctionToolSchema",
    },
    "verl.tools.schemas": {
        "OpenAIFunctionPropertySchema": f"{_SCHEMAS}:OpenAIFunctionPropertySchema",
        "OpenAIFunctionParametersSchema": f"{_SCHEMAS}:OpenAIFunctionParametersSchema",
        "OpenAIFunctionSchema": f"{_SCHEMAS}:OpenAIFunctionSchema",
        "OpenAIFunctionToolSchema": f"{_SCHEMAS}:OpenAIFunctionToolSchema",
        "OpenAIFunctionParsedSchema": f"{_SCHEMAS}:OpenAIFunctionParsedSchema",
        "OpenAIFunctionCallSchema": f"{_SCHEMAS}:OpenAIFunctionCallSchema",
        "OpenAIFunctionToolCall": f"{_SCHEMAS}:OpenAIFunctionToolCall",
        "ToolResponse": "rollout_sidecar.tools.base:ToolResponse",
    },
    "verl.tools.function_tool": {
        "function_tool": "rollout_sidecar.tools.function_tool:function_tool"
    },
    "verl.tools.gsm8k_tool": {"Gsm8kTool": "rollout_sidecar.tools.gsm8k:Gsm8kTool"},
    "verl.tools.search_tool": {"SearchTool": "rollout_sidecar.tools.search:SearchTool"},
    "verl.tools.sandbox_fusion_tools": {
        "SandboxFusionTool": "rollout_sidecar.tools.sandbox_fusion:SandboxFusionTool"
    },
    "verl.tools.mcp_base_tool": {"MCPBaseTool": "rollout_sidecar.tools.mcp:McpTool"},
    "verl.tools.mcp_search_tool": {"MCPSearchTool": "rollout_sidecar.tools.mcp:McpTool"},
    "verl.interactions": {},
    "verl.interactions.base": {
        "BaseInteraction": "rollout_sidecar.interactions.base:BaseInteraction"
    },
    "verl.interactions.gsm8k_interaction": {
        "Gsm8kInteraction": "rollout_sidecar.interactions.gsm8k:Gsm8kInteraction"
    },
    "verl.utils": {},
    "verl.utils.rollout_trace": {
        "rollout_trace_op": "rollout_sidecar.verl_rewards:rollout_trace_op"
    },
    "verl.utils.reward_score": {
        "default_compute_score": "rollout_sidecar.verl_rewards:default_compute_score"
    },
    "verl.utils.reward_score.gsm8k": {
        "compute_score": "rollout_sidecar.verl_rewards:gsm8k_compute_score",
        "extract_solution": "rollout_sidecar.verl_rewards:gsm8k_extract_solution",
    },
}
"""What stands in for verl: module -> name -> "module:name" of ours."""

STOCK_CLASSES: dict[str, str] = {
    f"{module}.{name}": ours
    for module in (
        "verl.tools.gsm8k_tool",
        "verl.tools.search_tool",
        "verl.tools.sandbox_fusion_tools",
        "verl.tools.mcp_base_tool",
        "verl.tools.mcp_search_tool",
        "verl.interactions.gsm8k_interaction",
    )
    for name, ours in MODULES[module].items()
}
"""verl's own tools and interactions. Named in a YAML file they are always ours, verl installed or not."""


def import_user_object(path: str, where: str, *, key: str = "class_name") -> Any:
    """The object at an import path `module.name`, verl's stock classes included. ValueError, starting with `where`.

    Args:
        key: the setting that held the path, for the message.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{where}: {key} {path!r} must be an import path, module.Class")
    if path in STOCK_CLASSES:
        module_name, _, name = STOCK_CLASSES[path].partition(":")
    install()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{where}: cannot import {module_name} for {key} {path!r}: {_describe(error)} (is it on PYTHONPATH?)"
        ) from error
    except (Exception, SystemExit) as error:
        # Foreign code: say whose it was.
        raise ValueError(
            f"{where}: the import of {module_name} for {key} {path!r} failed: {error!r}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(f"{where}: {module_name} has no class or function {name}") from None


def load_user_file(file: Path, where: str) -> types.ModuleType:
    """Runs a Python file of the user's, once for each path. ValueError, starting with `where`, if that fails."""
    file = file.resolve()
    if not file.is_file():
        raise ValueError(f"{where}: {file}: no such file")
    # A name of its own, so that two files called tools.py do not meet.
    name = f"user_file_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    install()
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{where}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ValueError(f"{where}: {file} could not be loaded: {_describe(error)}") from error
    return module


def install() -> None:
    """From now on verl's names can be imported. Does nothing the second time."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table, and explains why other modules of verl are not there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "verl":
            return None
        if name in MODULES:
            return importlib.machinery.ModuleSpec(name, self, is_package=_is_package(name))
        if not isinstance(sys.modules.get("verl"), _Module):
            return None  # the real verl, which lacks this module
        raise ModuleNotFoundError(
            f"No module named {name!r}: verl is not installed, and tooljax stands in for {_names(MODULES)} only",
            name=name,
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name, "Stands in for the module of verl, which is not installed.")

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: names are looked up when they are asked for."""


class _Module(types.ModuleType):
    """A module of the table."""

    def __init__(self, name: str, doc: str):
        super().__init__(name, doc)
        self.__file__ = __file__  # so that "cannot import name ..." says where it looked

    def __getattr__(self, name: str) -> Any:
        try:
            module_name, _, ours = MODULES[self.__name__][name].partition(":")
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None
        return getattr(importlib.import_module(module_name), ours)


_FINDER = _Finder()


def _describe(error: BaseException) -> str:
    """The error, and for a name that verl would have had, which ones there are."""
    text = f"{error}" if isinstance(error, ImportError) else f"{error!r}"
    if not isinstance(error, ImportError) or isinstance(error, ModuleNotFoundError):
        return text
    module = error.name or ""
    if not isinstance(sys.modules.get(module), _Module):
        return text
    names = _names(MODULES[module]) or "no names"
    return f"{text}: verl is not installed, and of {module} tooljax has {names} only"


def _is_package(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in MODULES)


def _names(names: dict[str, Any]) -> str:
    return ", ".join(sorted(names))
