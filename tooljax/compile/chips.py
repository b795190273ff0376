"""The chips and topologies that a program can be compiled for: TPUs without being there, GPUs that are.

Figures are the vendor's, for bfloat16 and one chip (https://cloud.google.com/tpu/docs/v5e, .../v5p and .../v6e, where
interconnect bandwidth is given for both directions together; here it is what a chip can send; for GPUs the data sheets
of H100 SXM and H200, with NVLink). The memory of a TPU is what libtpu 0.0.50 leaves to a program, as it says itself
when one does not fit: a quarter of a GiB less than the chip has on a v5e, more on a v6e. That of a GPU is what JAX's
allocator may take of it (XLA_PYTHON_CLIENT_MEM_FRACTION).
"""

import contextlib
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

GIB = 2**30


class NoCompiler(RuntimeError):
    """The compiler for a topology is not installed."""


@dataclass(frozen=True)
class Chip:
    """What bounds a program on one device."""

    name: str
    hbm_bytes: float
    """Of memory, for a program and all that it works on."""
    flops: float
    """A second, of bfloat16 products."""
    hbm_bandwidth: float
    """Bytes a second."""
    link_bandwidth: float
    """Bytes a second that a device sends over all its links."""


CHIPS = {
    "v5e": Chip("v5e", 15.75 * GIB, 197e12, 0.819e12, 200e9),
    "v5p": Chip("v5p", 95.73 * GIB, 459e12, 2.765e12, 600e9),
    "v6e": Chip("v6e", 31.24 * GIB, 918e12, 1.64e12, 400e9),
}

GPUS = {
    "NVIDIA H100": Chip("H100", 80e9, 989e12, 3.35e12, 450e9),
    "NVIDIA H200": Chip("H200", 141e9, 989e12, 4.8e12, 450e9),
}
"""By what JAX calls a device begins with."""


@dataclass(frozen=True)
class Topology:
    """Devices that need not be there, and what they can do."""

    name: str
    devices: Sequence[Any]
    chip: Chip | None
    """None for CPUs, and GPUs that are not known: nothing bounds them here."""

    @property
    def kind(self) -> str:
        """As JAX names the devices."""
        return self.devices[0].device_kind

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it."""
        return self.devices[0].platform == "tpu"


def topology(name: str) -> Topology:
    """The devices of a name such as "v5e:4x4", "gpu:2" for two of this machine's GPUs, or "cpu:8" for its CPU as eight.

    ValueError: no such topology. NoCompiler: libtpu is not installed, or there are not the GPUs.
    """
    chip, _, shape = name.partition(":")
    if chip == "cpu" and shape.isdecimal():
        return Topology(name, _cpus(int(shape)), None)
    if chip == "gpu" and shape.isdecimal():
        devices = _gpus(name, int(shape))
        return Topology(name, devices, _gpu_chip(devices[0]))
    if chip not in CHIPS or not re.fullmatch(r"\d+(x\d+)+", shape):
        raise ValueError(
            f"--topology {name!r} is unknown; write a chip of {[*CHIPS]} and its grid, such as v5e:4x4 or v5p:2x2x2, "
            "gpu:1 for a GPU of this machine, or cpu:8"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompiler(
            f"--topology {name} needs libtpu, the compiler for TPUs, which is not installed: pip install 'jax[tpu]'"
        )
    return Topology(name, _tpus(name), CHIPS[chip])


def _cpus(count: int) -> list[Any]:
    with contextlib.suppress(RuntimeError):  # JAX has been started: it keeps what it has
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if not 1 <= count <= len(devices):
        raise ValueError(f"--topology cpu:{count}: JAX has been started with {len(devices)} CPUs")
    return devices[:count]


def _gpus(name: str, count: int) -> list[Any]:
    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        devices = []
    if not 1 <= count <= len(devices):
        raise NoCompiler(
            f"--topology {name}: XLA compiles for GPUs that are there, trying kernels on them, and JAX sees "
            f"{len(devices)} here; run it on the machine that is to train"
        )
    return devices[:count]


def _gpu_chip(device: Any) -> Chip | None:
    found = next((c for kind, c in GPUS.items() if device.device_kind.startswith(kind)), None)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return replace(found, hbm_bytes=float(limit)) if found and limit else found


def _tpus(name: str) -> Sequence[Any]:
    from jax.experimental import topologies

    # Two programs may compile at once; the others keep libtpu from asking who it is on a machine that is no TPU host.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:
        raise ValueError(
            f"--topology {name!r}: libtpu does not know it ({str(error).splitlines()[0]}); "
            "v5e:4x4, v6e:8x8 and v5p:2x2x2 are some that it knows"
        ) from None
