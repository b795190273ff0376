"""SGLang's own metrics: its processes write what they count to files, of one folder a sidecar, which are read here.

SGLang makes such a folder too, one an engine, and deletes the last one with the next engine: files that are in use.
"""

import importlib
import os
import shutil
import tempfile
from contextlib import suppress

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable that prometheus_client finds the folder by. It must be set before that is imported."""

_users = 0
_made = ""


def open_folder() -> None:
    """Before an engine is started. A folder that the environment names already is used as it is."""
    global _users, _made
    _users += 1
    if VARIABLE not in os.environ:
        _made = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="tooljax_metrics_")


def close_folder() -> None:
    """After an engine was closed: the last one takes the folder with it."""
    global _users, _made
    _users -= 1
    if not _users and _made:
        shutil.rmtree(_made, ignore_errors=True)
        del os.environ[VARIABLE]
        _made = ""


def forget_names() -> None:
    """Lets another engine of this process register metrics of the same names. What they count goes on."""
    registry = importlib.import_module("prometheus_client").REGISTRY
    for name, collector in dict(registry._names_to_collectors).items():
        if name.startswith("sglang:"):
            with suppress(KeyError):  # it has several names
                registry.unregister(collector)


def metrics_text() -> str:
    """What all of SGLang's processes count, as Prometheus text (version 0.0.4)."""
    if not os.path.isdir(os.environ.get(VARIABLE, "")):
        return ""
    client = importlib.import_module("prometheus_client")
    registry = client.CollectorRegistry()
    importlib.import_module("prometheus_client.multiprocess").MultiProcessCollector(registry)
    return client.generate_latest(registry).decode()
