"""What the benchmarks of kernels on a GPU share: a time budget, shares of the product ceiling, workspaces."""

import functools
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

MIB = 2**20


class Candidate(NamedTuple):
    """Something to time: a call that returns when the GPU is done, or whose arrays can be waited for."""

    call: Callable
    flops: float
    """Useful ones: recomputation does not count."""
    workspace: float
    """MiB allocated beyond inputs and outputs."""
    loss: float
    """What it computed, to see that candidates compute the same."""


class Run:
    """Time left, the ceiling, and everything that was measured."""

    def __init__(self, budget_s: float):
        self.begun = time.perf_counter()
        self.budget_s = budget_s
        self.ceiling = 800e12
        self.rows: list[dict] = []

    @property
    def over(self) -> bool:
        return time.perf_counter() - self.begun > self.budget_s

    def attempt(self, name: str, measure: Callable) -> Any:
        """Runs and reports one variant; None if it failed or the time is up."""
        if self.over:
            print(f"{name:56s} SKIPPED: {self.budget_s:.0f} s are over", flush=True)
            return None
        begun = time.perf_counter()
        try:
            got = measure()
        except (ImportError, NotImplementedError) as error:
            print(f"{name:56s} LEFT OUT: {error}", flush=True)
            return None
        except Exception as error:
            text = " ".join(str(error).split())
            print(f"{name:56s} FAIL {type(error).__name__}: {text[:300]}", flush=True)
            self.rows.append({"name": name, "error": traceback.format_exc()})
            return None
        seconds = time.perf_counter() - begun
        if isinstance(got, dict):
            told = "  ".join(f"{key} {_short(value)}" for key, value in got.items())
            print(f"{name:56s} {told}  [{seconds:.1f} s]", flush=True)
            self.rows.append({"name": name, **got})
        elif isinstance(got, Candidate):
            print(f"{name:56s} ready, loss {got.loss:.6f}  [{seconds:.1f} s]", flush=True)
        return got

    def share(self, flops: float, ms: float) -> float:
        return flops / (ms * 1e-3) / self.ceiling


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compiled(function: Callable, *args) -> tuple[Callable, float]:
    """The compiled function, and its workspace in MiB."""
    made = jax.jit(function).lower(*args).compile()
    memory = made.memory_analysis()
    return made, (memory.temp_size_in_bytes if memory else float("nan")) / MIB


def jax_candidate(function: Callable, args: tuple, flops: float, loss_of: Callable) -> Candidate:
    """`loss_of` takes what the function returns."""
    made, workspace = compiled(function, *args)
    return Candidate(functools.partial(made, *args), flops, workspace, float(loss_of(made(*args))))
