"""The sidecars of a run of several processes: process 0 asks them, and the others are told what it heard.

Every process makes the same calls in the same order. An error that process 0 meets is raised in all of them, and a
signal to any of them asks the whole run to stop.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from rollout_sidecar.client import SidecarError
from rollout_sidecar.protocol import Info
from tooljax import distributed
from tooljax.channel import Channel
from tooljax.config import Config
from tooljax.config.schema import WeightsConfig
from tooljax.rollouts import Groups, InterruptedRollout, Rollout, Sidecars, open_sidecars
from tooljax.weights.push import PushReport

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def open_shared_sidecars(config: Config) -> Iterator[Sidecars]:
    """As `open_sidecars`, which only process 0 does: for all processes of the run, and for a single one."""
    if distributed.is_alone():
        with open_sidecars(config) as sidecars:
            yield sidecars
        return
    if distributed.is_first():
        with open_sidecars(config) as real, SharedSidecars(real) as sidecars:
            yield sidecars
        return
    with SharedSidecars(None) as sidecars:
        yield sidecars


class SharedSidecars(Sidecars):
    """`Sidecars` for all processes. A context manager, in all of them."""

    def __init__(self, real: Sidecars | None, *, channel: Channel | None = None):
        """`real` are those of process 0; the others have None."""
        self._real = real
        self._channel = channel or Channel()
        self._handlers: dict[int, Any] = {}
        self._over = threading.Event()
        self._asked = threading.Event()
        """Set by a signal to this process, or when the run is known to stop."""
        self._forwarded = False
        self._thread = threading.Thread(target=self._look, name="tooljax-stop", daemon=True)

    def __enter__(self) -> "SharedSidecars":
        # Which version a step is, each process says for itself from here on.
        self._first_version = self.everywhere(lambda real: real.version_of(0))
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def stop_requested(self) -> bool:
        """Whether the run is asked to stop: what process 0 knows at this call."""
        return self.everywhere(lambda real: real.stop_requested)

    def info(self) -> list[Info]:
        """As in Sidecars."""
        return self.everywhere(lambda real: real.info())

    def check_fit(self, **wanted: Any) -> None:
        """As in Sidecars."""
        self.everywhere(lambda real: real.check_fit(**wanted))

    def push(
        self, tensors: Iterable[tuple[str, jax.Array]], *, step: int, weights: WeightsConfig
    ) -> PushReport:
        """As in Sidecars. Tensor by tensor the weights are put together in all processes; process 0 has them all in its
        host's memory, and what changed since the push before is found there."""
        held = []
        for name, array in tensors:
            values = distributed.to_host(array)
            if self._real is not None:
                held.append((name, jax.device_put(values, _host_device())))
        return self.everywhere(lambda real: real.push(held, step=step, weights=weights))

    def on_each(self, ask: Any, *, interruptible: bool = True) -> list[tuple[str, Any]]:
        """As in Sidecars; only process 0 asks."""
        return self.everywhere(lambda real: real.on_each(ask, interruptible=interruptible))

    def metrics(self) -> dict[str, float]:
        """As in Sidecars."""
        return self.everywhere(lambda real: real.metrics())

    def start(self, tasks: Any, **wanted: Any) -> "SharedRollout":
        """As in Sidecars. `on_progress` is called in process 0."""
        begun: list[Rollout] = []
        self.everywhere(lambda real: begun.append(real.start(tasks, **wanted)))
        return SharedRollout(self, begun[0] if begun else None)

    def everywhere(self, ask: Callable[[Sidecars], Any]) -> Any:
        """What process 0 gets, or the error that it meets."""
        if self._real is None:
            kind, told = self._channel.hear()
            if kind != "answer":
                raise _error(kind, *told)
            return told
        try:
            answer = ask(self._real)
        except (InterruptedRollout, SidecarError, ValueError) as error:
            self._channel.tell(_described(error))
            raise
        self._channel.tell(("answer", answer))
        return answer

    # --- signals ---

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first one; a second one ends the process at once."""
        self._asked.set()
        if self._real is None:
            self._restore_default()
            return
        self._handlers[number](number, frame)
        if self._forwarded:  # whoever signals one process may signal all: that is no second signal
            for each in SIGNALS:
                signal.signal(each, self._once_more)

    def _once_more(self, number: int, frame: FrameType | None) -> None:
        self._restore_default()

    def _restore_default(self) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def _look(self) -> None:
        """Tells process 0 that this one was signalled; there, has the run stopped as if it had been itself."""
        while not self._over.wait(distributed.POLL_S):
            if self._real is None and self._asked.is_set():
                distributed.request_stop()
                return
            if self._real is not None and distributed.stop_was_requested():
                if not self._asked.is_set():
                    self._forwarded = True
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return


class SharedRollout(Rollout):
    """A `Rollout` of process 0, for all processes."""

    def __init__(self, sidecars: SharedSidecars, real: Rollout | None):
        self._shared = sidecars
        self._real = real

    def take(self) -> Groups:
        """As in Rollout."""
        return self._shared.everywhere(lambda _: self._real and self._real.take())

    def give_up(self) -> None:
        """As in Rollout; nobody is told."""
        if self._real is not None:
            self._real.give_up()


def _host_device() -> Any:
    """Where a host's arrays are. ValueError if JAX was told to do without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "weights of several hosts are pushed from the host's memory, but JAX_PLATFORMS leaves out cpu; add it at "
            "the end, as in JAX_PLATFORMS=cuda,cpu"
        ) from error


def _described(error: Exception) -> tuple[str, tuple[Any, ...]]:
    if isinstance(error, InterruptedRollout):
        return "interrupted", ()
    if isinstance(error, SidecarError):
        return "sidecar", (str(error), error.kind, error.status)
    return "value", (str(error),)


def _error(kind: str, *told: Any) -> Exception:
    if kind == "interrupted":
        return InterruptedRollout()
    if kind == "sidecar":
        return SidecarError(told[0], kind=told[1], status=told[2])
    return ValueError(*told)
