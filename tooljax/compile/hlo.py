"""Reads optimized HLO text: what a program communicates and moves, with loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once, so a scan over layers would be one layer. Here the calls between
computations are followed, and a loop's length is read from `known_trip_count` or from its condition, a comparison
with a constant. A loop whose length is data (chunks of valid tokens) counts as often as the caller says.

Bytes are those of operands and results outside fusions, in device memory only: what is in VMEM (layouts with S(1)) is
not counted. A fusion that reads a slice of an operand reads the slice.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "partition-id", "replica-id", "iota", "opt-barrier"),
    *("async-start", "async-update", "async-done"),
}
"""Instructions that move nothing themselves."""
_BOOKKEEPING = ("AllocateBuffer", "ConcatBitcast", "AsyncCollective", "AssumeGather", "Sharding")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16}


@dataclass
class Collective:
    """All collectives of one kind of a program, on one device."""

    count: float = 0
    payload_bytes: float = 0
    """Of results; of the operand of a reduce-scatter."""
    sent_bytes: float = 0
    """What a device sends at least, in a ring."""


@dataclass
class Traffic:
    """What one run of a program moves on one device."""

    collectives: dict[str, Collective] = field(default_factory=dict)
    hbm_bytes: float = 0
    unknown_loops: int = 0
    """Loops whose length the text does not say."""

    @property
    def sent_bytes(self) -> float:
        """Of all collectives."""
        return sum(each.sent_bytes for each in self.collectives.values())


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """Attributes, after the operands."""
    inner: str
    """What is between the parentheses: the number of a parameter, the value of a constant."""
    root: bool


Computations = dict[str, dict[str, Instruction]]

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\) -> .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([0-9,<=]*)\](\{[^}]*\})?")


def traffic(text: str, *, unknown_trips: int = 1) -> Traffic:
    """What a program with this optimized HLO moves. `unknown_trips` is the length of loops that do not say theirs."""
    computations, entry = parse(text)
    found = Traffic()
    times = _times(computations, entry, unknown_trips, found)
    collectives: dict[str, Collective] = defaultdict(Collective)
    fused = {called for each in computations.values() for called in _fusions(each.values())}
    for name, instructions in computations.items():
        starts = any("AsyncCollectiveStart" in each.rest for each in instructions.values())
        for each in instructions.values():
            kind = each.opcode.removesuffix("-start")
            # A TPU shows an asynchronous collective in each fusion that it runs beside: it counts where it starts.
            if kind in KINDS and (name not in fused or starts):
                _count(collectives[kind], each, instructions, times[name])
            if name not in fused:
                found.hbm_bytes += times[name] * _moved(each, instructions, computations)
    found.collectives = {kind: collectives[kind] for kind in KINDS if collectives[kind].count}
    return found


# --- reading --------------------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[Computations, str]:
    """The instructions of every computation by name, and the name of the entry. ValueError if there is none."""
    computations: Computations = {}
    entry, current = "", {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif start := _LINE.match(line):
            shape, after = _shape_of(line, start.end())
            if opcode := _OPCODE.match(line, after):
                inner, rest = _parenthesised(line, opcode.end())
                operands = tuple(re.findall(r"%([\w.\-]+)", inner))
                current[start[2]] = Instruction(
                    start[2], shape, opcode[1], operands, rest, inner, bool(start[1])
                )
    if not entry:
        raise ValueError("the text has no ENTRY computation; it must be compiled.as_text()")
    return computations, entry


def _shape_of(line: str, start: int) -> tuple[str, int]:
    """The type of an instruction, which may be a tuple, and where it ends."""
    if line.startswith("(", start):
        inner, _ = _parenthesised(line, start + 1)
        end = start + len(inner) + 2
    else:
        end = line.find(" ", start)
        end = len(line) if end < 0 else end
    return line[start:end], end


def _parenthesised(line: str, start: int) -> tuple[str, str]:
    """What is up to the parenthesis that closes the one before `start`, and what follows it."""
    depth = 1
    for end in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        if not depth:
            return line[start:end], line[end + 1 :]
    return line[start:], ""


def shape_bytes(shape: str, *, hbm_only: bool = False) -> float:
    """Of all arrays of a type such as "(bf16[8,128]{1,0:T(8,128)}, f32[])"."""
    return sum(_array_bytes(shape, hbm_only))


def _array_bytes(shape: str, hbm_only: bool = False) -> Iterator[float]:
    for dtype, sizes, layout in _ARRAY.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits[0]) if digits else 0)
        elsewhere = hbm_only and re.search(r"S\([1-9]", layout)
        count = math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        yield 0.0 if elsewhere else bits * count / 8


# --- how often ------------------------------------------------------------------------------------------------------


def _times(
    computations: Computations, entry: str, unknown_trips: int, found: Traffic
) -> Counter[str]:
    """How often each computation runs. A computation is written before those that call it."""
    times: Counter = Counter({entry: 1})
    for name in reversed(computations):
        for each in computations[name].values():
            for called in _called(each):
                if called not in computations:
                    continue
                trips = 1
                if each.opcode == "while":
                    known = trip_count(each, computations)
                    trips = unknown_trips if known is None else known
                    found.unknown_loops += known is None and called in each.rest.split("body=")[1]
                times[called] += times[name] * trips
    return times


def _called(each: Instruction) -> list[str]:
    """Computations that an instruction runs, but for those of single elements."""
    if each.opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", each.rest)
        names = branches[1] if branches else ""
        two = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", each.rest)
        return [*re.findall(r"%?([\w.\-]+)", names), *two]
    wanted = {"while": "body", "call": "to_apply"}.get(each.opcode, "calls")
    return re.findall(rf"\b{wanted}=%?([\w.\-]+)", each.rest)


def _fusions(instructions) -> Iterator[str]:
    for each in instructions:
        if each.opcode == "fusion":
            yield from _called(each)


def trip_count(loop: Instruction, computations: Computations) -> int | None:
    """How often a while loop runs, which counts from 0; None if that is not in the text."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    instructions = computations.get(condition[1], {}) if condition else {}
    for each in instructions.values():
        if each.root and each.opcode == "compare" and "direction=LT" in each.rest:
            counter, bound = (instructions.get(name) for name in each.operands)
            if counter is not None and bound is not None and bound.opcode == "constant":
                index = re.search(r"index=(\d+)", counter.rest)
                body = computations.get(_called(loop)[0], {})
                return -(-int(bound.inner) // _step(body, int(index[1]) if index else 0))
    return None


def _step(body: dict[str, Instruction], index: int) -> int:
    """What a loop's body adds to its counter, which is an element of what it carries: more than 1 if unrolled."""
    root = next((each for each in body.values() if each.root), None)
    if root is None or len(root.operands) <= index:
        return 1
    step, at = 0, body.get(root.operands[index])
    while at is not None and at.opcode == "add":
        terms = [body[name] for name in at.operands if name in body]
        step += sum(int(each.inner) for each in terms if each.opcode == "constant")
        at = next((each for each in terms if each.opcode != "constant"), None)
    return step or 1


# --- what is moved --------------------------------------------------------------------------------------------------


def group_size(rest: str, fallback: int = 2) -> int:
    """Of the devices that take part in a collective together, from its attributes."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(tiled[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", named[2]))
    return fallback


def _count(
    total: Collective, each: Instruction, instructions: dict[str, Instruction], times: float
) -> None:
    kind = each.opcode.removesuffix("-start")
    if each.opcode != kind and each.shape.startswith("(") and kind != "all-reduce":
        # Operands come first, then as many results.
        payload = list(_array_bytes(each.shape))[len(each.operands)]
    else:
        payload = shape_bytes(each.shape)
    size = group_size(each.rest)
    if kind == "reduce-scatter":
        payload *= size
    share = (size - 1) / size
    factor = {"collective-permute": 1.0, "all-reduce": 2 * share}.get(kind, share)
    total.count += times
    total.payload_bytes += times * payload
    total.sent_bytes += times * factor * payload


def _moved(
    each: Instruction, instructions: dict[str, Instruction], computations: Computations
) -> float:
    """Bytes of device memory that an instruction reads and writes."""
    if each.opcode in _FREE or each.opcode.endswith("-done"):
        return 0.0
    if each.opcode == "custom-call" and any(name in each.rest for name in _BOOKKEEPING):
        return 0.0
    operands = [instructions[name].shape for name in each.operands if name in instructions]
    if each.opcode.endswith("-start"):
        results = list(_array_bytes(each.shape, True))
        return sum(shape_bytes(shape, hbm_only=True) for shape in operands) + results[0]
    if each.opcode == "dynamic-slice":
        return 2 * shape_bytes(each.shape, hbm_only=True)
    if each.opcode == "dynamic-update-slice":
        return 2 * shape_bytes(operands[1], hbm_only=True) if len(operands) > 1 else 0.0
    called = _called(each)
    if each.opcode == "fusion" and called and called[0] in computations:
        return _fusion_bytes(each, operands, computations[called[0]])
    return sum(shape_bytes(shape, hbm_only=True) for shape in [each.shape, *operands])


def _fusion_bytes(each: Instruction, operands: list[str], inside: dict[str, Instruction]) -> float:
    users: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in inside.values():
        for operand in instruction.operands:
            users[operand].append(instruction)
    moved = 0.0
    for instruction in inside.values():
        if instruction.opcode == "parameter" and int(instruction.inner) < len(operands):
            whole = shape_bytes(operands[int(instruction.inner)], hbm_only=True)
            moved += min(whole, _read(instruction.name, whole, users, inside))
    written = shape_bytes(each.shape, hbm_only=True)
    updates = [i for i in inside.values() if i.opcode == "dynamic-update-slice"]
    if updates and not each.shape.startswith("("):
        written = min(written, sum(shape_bytes(inside[i.operands[1]].shape) for i in updates))
    return moved + written


def _read(
    name: str,
    whole: float,
    users: dict[str, list[Instruction]],
    inside: dict[str, Instruction],
) -> float:
    """Bytes of a fusion's parameter that are read: its slices, where only those are used."""
    total = 0.0
    for user in users[name]:
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            total += shape_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            total += 0.0  # updated in place
        elif user.opcode == "bitcast":
            total += _read(user.name, whole, users, inside)
        else:
            return whole
    return total
