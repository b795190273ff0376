"""One run as several processes, one a host: who they are, and that they end together.

All make the same steps on the same batch. Process 0 alone talks to sidecars and trackers and writes the run's folder;
what it hears the others are told (`tooljax.shared_sidecars`). So whatever a step depends on is the same everywhere
without being compared, sidecars see one client, and one address and token are enough. The price is that a batch passes
through one host, some tens of megabytes a step.

A process that fails says so to all, and they end: nobody waits for a collective that a dead process would be needed
for. One that is killed without a word is missed after HEARTBEAT_S, and ends the others too.
"""

import atexit
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # there is no public way to its key-value store
from jax.experimental import multihost_utils

from tooljax.config import Config
from tooljax.config.schema import MeshConfig, TrackConfig

DETECTED = "detected"
"""In place of a coordinator: JAX finds all by itself, which it does on Cloud TPU."""

HEARTBEAT_S = 60
"""After which a process that is silent counts as dead."""

POLL_S = 0.3
FAREWELL_S = 3.0
"""How long a process that fails, or hears of it, goes on, so that each can tell its own reason."""

LAST_STEPS_S = 3600
"""How long the others wait for process 0 to write the policy at the end."""

FAILED, STOP = "tooljax/failed", "tooljax/stop"
"""Keys in the store that all processes share."""


@dataclass(frozen=True)
class Place:
    """Which process this is."""

    coordinator: str
    """host:port of process 0, or DETECTED: then nothing else is known before JAX has been asked."""
    processes: int = 0
    process_id: int = 0


def place_of(mesh: MeshConfig, environment: Mapping[str, str]) -> Place | None:
    """This process's place by the config, or else by the environment; None for a run of one process.

    ValueError says what is missing, and where it can be set.
    """
    if not mesh.coordinator:
        return None
    coordinator = mesh.coordinator
    if coordinator == "auto":
        coordinator = environment.get("JAX_COORDINATOR_ADDRESS") or _of_slurm(environment)
        if not coordinator:
            return Place(DETECTED)
    if not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(
            f"mesh.coordinator: {coordinator!r} is no host:port; name process 0's host and a free port of it, or auto"
        )
    processes = mesh.processes or _number(
        environment, "mesh.processes", "JAX_NUM_PROCESSES", "SLURM_NTASKS"
    )
    process_id = mesh.process_id
    if process_id < 0:
        names = ("JAX_PROCESS_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
        process_id = _number(environment, "mesh.process_id", *names)
    if process_id >= processes:
        raise ValueError(
            f"this is process {process_id} of {processes}, but they are numbered from 0: mend mesh.processes and "
            "mesh.process_id, or what stands for them in the environment"
        )
    return Place(coordinator, processes, process_id)


def _of_slurm(environment: Mapping[str, str]) -> str:
    """The first host of the job step, and a port that follows from the job's number; "" outside of SLURM."""
    if "SLURM_JOB_ID" not in environment:
        return ""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if first is None:
        raise ValueError(
            "mesh.coordinator='auto' in a SLURM job, but SLURM_STEP_NODELIST is not set: start the trainer with srun"
        )
    port = 61_440 + int(environment["SLURM_JOB_ID"]) % 4096
    return f"{first[1]}{first[2] or ''}:{port}"


def _number(environment: Mapping[str, str], field: str, *names: str) -> int:
    """What the first variable that is set says. ValueError if none is, or if that is no number."""
    for name in names:
        if name in environment:
            if not environment[name].isdecimal():
                raise ValueError(
                    f"{name}={environment[name]!r} is no number from 0; or set {field}"
                )
            return int(environment[name])
    raise ValueError(
        f"mesh.coordinator is set, but {field} is not, and neither is {' or '.join(names)}; set one of them"
    )


def is_first() -> bool:
    """Whether this process writes the run's files; a run of one process always does."""
    return global_state.process_id == 0


def is_alone() -> bool:
    """Whether the run has no other process."""
    return global_state.num_processes == 1


def store() -> Any:
    """The key-value store that the processes of a run share, by JAX's coordinator."""
    assert global_state.client is not None, "a run of one process has no such store"
    return global_state.client


def to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """An array's values. Of one that is spread over hosts every process must ask, and each device holds it for a
    moment."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


@contextmanager
def joined(config: Config) -> Iterator[Config]:
    """Waits for the other processes of the run, and gives the config that this one works with.

    To be entered before JAX is asked for its devices. All processes leave the block together, or end. What a process
    other than the first writes into its run.dir is thrown away, but for checkpoints. ValueError if they cannot meet.
    """
    place = place_of(config.mesh, os.environ)
    if place is None:
        yield config
        return
    _initialize(place)
    watch = _Watch()
    try:
        with _own(config) as own:
            yield own
            store().wait_at_barrier("tooljax/end", LAST_STEPS_S * 1000)
    except BaseException as error:
        watch.tell_failure(error)
        raise
    finally:
        watch.end()


def _initialize(place: Place) -> None:
    known: dict[str, Any] = {}
    if place.coordinator != DETECTED:
        # Else it would look for devices of its own choice: under SLURM one GPU a process.
        known = {
            "coordinator_address": place.coordinator,
            "num_processes": place.processes,
            "process_id": place.process_id,
            "cluster_detection_method": "deactivate",
        }
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=HEARTBEAT_S)
    except (ValueError, RuntimeError) as error:
        if place.coordinator == DETECTED:
            raise ValueError(
                "mesh.coordinator='auto', but neither JAX_COORDINATOR_ADDRESS nor SLURM nor Cloud TPU says which "
                f"processes there are ({error}); set mesh.coordinator='host:port', mesh.processes and mesh.process_id"
            ) from error
        raise ValueError(
            f"process {place.process_id} of {place.processes} could not meet the others at "
            f"mesh.coordinator={place.coordinator}: {error}"
        ) from error
    # JAX has taken the signal for a notice of its own; a run that has not begun yet may just end.
    signal.signal(signal.SIGTERM, on_terminate or signal.SIG_DFL)


@contextmanager
def _own(config: Config) -> Iterator[Config]:
    """The config of this process: all but the first are silent, and write into a folder that goes away."""
    if is_first():
        yield config
        return
    checkpoints = (Path(config.run.dir) / "checkpoints").absolute()
    with tempfile.TemporaryDirectory(prefix="tooljax_") as folder:
        (Path(folder) / "checkpoints").symlink_to(checkpoints)
        yield replace(
            config,
            run=replace(config.run, dir=folder, progress="off"),
            store=replace(config.store, enabled=False),
            track=TrackConfig(tensorboard=False, mlflow=False, wandb=False),
        )


def request_stop() -> None:
    """Asks process 0 to stop, as a signal to it would."""
    with suppress(RuntimeError):  # somebody has asked before
        store().key_value_set(STOP, str(global_state.process_id))


def stop_was_requested() -> bool:
    """Whether a process has asked."""
    return _there(STOP) is not None


def _there(key: str) -> str | None:
    """What is stored there now."""
    try:
        return store().key_value_try_get(key)
    except RuntimeError:  # nothing
        return None


class _Watch:
    """Looks whether another process has failed, and then ends this one, whatever it is doing."""

    def __init__(self):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tooljax-processes", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Looks no longer."""
        self._over.set()
        self._thread.join()

    def tell_failure(self, error: BaseException) -> None:
        """Tells all processes, and has this one end without waiting for them once its error was shown."""
        self._over.set()  # this one ends by itself
        told = {"process": global_state.process_id, "error": f"{error or type(error).__name__}"}
        with suppress(RuntimeError):  # another one was first
            store().key_value_set(FAILED, json.dumps(told))
        if is_first():
            time.sleep(FAREWELL_S + 2)  # it keeps the store that the others look into
        # Runs before what JAX has registered, which would wait for the others.
        atexit.register(_leave)

    def _look(self) -> None:
        while not self._over.wait(POLL_S):
            if found := _there(FAILED):
                told = json.loads(found)
                if told["process"] == global_state.process_id or self._over.wait(FAREWELL_S):
                    return
                print(
                    f"tooljax: process {told['process']} of {global_state.num_processes} has failed, so this one "
                    f"ends: {told['error']}",
                    file=sys.stderr,
                )
                _leave()


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
