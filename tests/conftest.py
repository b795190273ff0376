"""Strict settings for every test: no silent promotion or broadcasting, 8 CPU devices, no network, fixed seeds.

Warnings are errors, and a test may take 60 s (pyproject.toml). JAX_PLATFORMS=cuda or tpu runs the hardware tests.
"""

import ipaddress
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A cache that outlives the run could hide a change in what is compiled.
jax.config.update("jax_enable_compilation_cache", False)

# The same examples in every run, and no deadline that a busy machine could miss.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu or tpu where JAX has no such device."""
    for item in items:
        for kind in ("gpu", "tpu"):
            if item.get_closest_marker(kind) and jax.default_backend() != kind:
                item.add_marker(pytest.mark.skip(reason=f"needs a {kind.upper()}"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Python's and NumPy's global generators start the same in every test. JAX has no global generator."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails any connection that would leave this machine. Servers on 127.0.0.1 and Unix sockets are fine."""
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))


def _guarded(connect):
    def guarded(sock: socket.socket, address):
        if sock.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            sock.close()  # else the complaint would be about the leaked socket
            raise RuntimeError(f"a test tried to connect to {address}; tests may only use loopback")
        return connect(sock, address)

    return guarded


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture
def quick_compilations() -> Iterator[None]:
    """Programs for several devices take long to optimise, and what they say is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct; skips without it."""
    return _folder_named_by("TOOLJAX_TEST_MODEL")


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """Folder of Qwen3's tokenizer.json and tokenizer_config.json; skips without it."""
    return _folder_named_by("TOOLJAX_TEST_QWEN3_TOKENIZER")


def _folder_named_by(variable: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(
            f"{variable} is not set; `make test-models` makes the folder and prints the line to export"
        )
    return Path(folder)
