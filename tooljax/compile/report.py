"""What `python -m tooljax.compile_check` prints: tables of memory, time and communication on one device."""

from collections.abc import Iterator
from typing import NamedTuple

from tooljax.compile.chips import GIB, Chip, Topology
from tooljax.compile.program import Compiled, Program
from tooljax.config import Config
from tooljax.model.flops import update_flops


class Roofline(NamedTuple):
    """The shortest time that a program can take, by what bounds it."""

    compute_s: float
    memory_s: float
    links_s: float

    @property
    def seconds(self) -> float:
        """If all three overlap."""
        return max(self)

    @property
    def bound(self) -> str:
        """The one that takes longest."""
        return ("compute", "HBM", "links")[self.index(self.seconds)]


def roofline(program: Program, chip: Chip) -> Roofline:
    """From the program's operations and bytes, and the chip's rates."""
    return Roofline(
        program.flops / chip.flops,
        program.traffic.hbm_bytes / chip.hbm_bandwidth,
        program.traffic.sent_bytes / chip.link_bandwidth,
    )


def too_large(compiled: Compiled, chip: Chip | None) -> list[str]:
    """A sentence for each program that takes more memory than a device has."""
    if chip is None:
        return []
    return [
        f"{program.name} needs {program.needed_bytes / GIB:.2f} GiB of the {chip.hbm_bytes / GIB:.2f} GiB of a "
        f"{chip.name}; use more devices, fewer batch.rows_per_microbatch, or a mesh that splits more"
        for program in compiled.programs
        if program.needed_bytes > chip.hbm_bytes
    ]


def report(config: Config, topology: Topology, compiled: Compiled) -> str:
    """All tables, in Markdown."""
    lines = [*_head(config, topology, compiled), "", *_memory(compiled, topology.chip), ""]
    lines += [*_work(config, topology, compiled), "", *_collectives(compiled)]
    return "\n".join(lines)


def _head(config: Config, topology: Topology, compiled: Compiled) -> Iterator[str]:
    mesh = compiled.layout.mesh
    shape = mesh.shape.items() if mesh else ()
    sizes = " x ".join(f"{axis}={size}" for axis, size in shape if size > 1)
    yield (
        f"{config.model.path}: {compiled.weights / 1e9:.2f} billion weights, {config.model.dtype}, on {topology.name} "
        f"({compiled.devices} x {topology.kind}), mesh {sizes or 'of one device'}"
    )
    yield (
        f"a microbatch: {config.batch.rows_per_microbatch} rows of {compiled.row_length} tokens, model.remat="
        f"{config.model.remat!r}; compiled in {sum(each.compile_s for each in compiled.programs):.0f} s, not run"
    )


def _memory(compiled: Compiled, chip: Chip | None) -> Iterator[str]:
    room = f" of {chip.hbm_bytes / GIB:.2f} |" if chip else ""
    yield f"| GiB on a device | arguments | outputs | temporaries | peak | held beside | needed |{room}"
    yield "|---" * (8 if chip else 7) + "|"
    for each in compiled.programs:
        sizes = (
            each.argument_bytes, each.output_bytes, each.temporary_bytes, each.peak_bytes, each.held_bytes,
            each.needed_bytes,
        )  # fmt: skip
        share = f" {each.needed_bytes / chip.hbm_bytes:.0%} |" if chip else ""
        yield f"| {each.name} |" + "".join(f" {size / GIB:.3f} |" for size in sizes) + share


def _work(config: Config, topology: Topology, compiled: Compiled) -> Iterator[str]:
    chip = topology.chip
    times = " roofline ms (compute, HBM, links) | bound |" if chip else ""
    yield f"| on a device | TFLOP | XLA's count | HBM GB | sent GB |{times}"
    yield "|---" * (7 if chip else 5) + "|"
    for each in compiled.programs:
        line = (
            f"| {each.name} | {each.flops / 1e12:.3f} | {each.xla_flops / 1e12:.3f} |"
            f" {each.traffic.hbm_bytes / 1e9:.2f} | {each.traffic.sent_bytes / 1e9:.3f} |"
        )
        if chip:
            time = roofline(each, chip)
            parts = ", ".join(f"{seconds * 1e3:.1f}" for seconds in time)
            line += f" {time.seconds * 1e3:.1f} ({parts}) | {time.bound} |"
        yield line
    if chip:
        yield ""
        yield f"highest MFU of gradients at these rates: {_highest_mfu(compiled, chip):.0%}"


def _highest_mfu(compiled: Compiled, chip: Chip) -> float:
    """Of full rows, with what is computed a second time as overhead."""
    (gradients,) = [each for each in compiled.programs if each.name == "gradients"]
    rows, length = compiled.tokens // compiled.row_length, compiled.row_length
    pairs = rows * length * (length + 1) // 2
    wanted = update_flops(compiled.shape, compiled.tokens, pairs, compiled.tokens)
    return wanted / compiled.devices / chip.flops / roofline(gradients, chip).seconds


def _collectives(compiled: Compiled) -> Iterator[str]:
    yield "| collectives of | kind | count | GB | sent GB |"
    yield "|---" * 5 + "|"
    for program in compiled.programs:
        for kind, each in program.traffic.collectives.items():
            yield (
                f"| {program.name} | {kind} | {each.count:.0f} | {each.payload_bytes / 1e9:.4f} |"
                f" {each.sent_bytes / 1e9:.4f} |"
            )
