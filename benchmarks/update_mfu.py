"""The whole GRPO update on a GPU: tokens/s, share of the product rate (MFU) and memory, beside the same in torch.

    python benchmarks/update_mfu.py                            # one H200: Qwen2.5 shapes of 0.5B, 1.5B and 3B
    python benchmarks/update_mfu.py --sizes 0.5B --profile     # and where the time goes
    python benchmarks/update_mfu.py --sizes 0.5B --sides ours --set model.remat=none     # or --segments 16
    python benchmarks/update_mfu.py --sides ours --mesh one fsdp=2 tensor=2      # two GPUs, each against one
    JAX_PLATFORMS=cpu python benchmarks/update_mfu.py --sizes tiny --steps 1     # does it run at all

An update is the trainer's: a pass for the old log-probs of every row, then loss, gradients and AdamW with float32
master weights, through `tooljax.update.Updater`. Weights are random and made on the device. Rows hold 16384 tokens in
eight trajectories, two thirds of them in the loss; a microbatch is one row a device. Each side of each size has a
process of its own, and the card for itself.

MFU is operations that the algorithm needs (`tooljax.work`: old log-probs 1, update 3 forward passes) over the time and
the rate of bfloat16 products (8192 cubed), the highest that any process of this run measured. Peak memory is the
allocator's, beside what `tooljax.compile_check` predicts for the same config (`--topology gpu:1`).

The peer is transformers' Qwen2 in torch: layers through torch.compile, the fastest attention of those that keep packed
trajectories apart (varlen flash attention, cuDNN and flash SDPA for each trajectory), a head that makes loss and
gradients in one pass over chunks, as Liger's fused losses do, gradients added in float32, fused AdamW on float32 master
weights; gradient checkpointing where it does not fit without.

--mesh has not been measured: it needs as many GPUs as its sizes multiply to.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent / "support"
GOALS = {"0.5B": 0.35, "1.5B": 0.45, "3B": 0.45}
SCALING = 1.85
PREDICTED = 0.10

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--sizes", default="0.5B,1.5B,3B", help="of tiny, 0.5B, 1.5B, 3B")
    parser.add_argument("--sides", default="ours,torch")
    parser.add_argument("--mesh", nargs="+", default=["one"], help="ours: one, fsdp=2, tensor=2")
    parser.add_argument("--rows", type=int, default=4, help="of 16384 tokens, in an update")
    parser.add_argument("--rows_per_microbatch", type=int, default=1, help="of each device, ours")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm_up", type=int, default=2)
    parser.add_argument(
        "--segments", type=int, default=0, help="ours: that cuDNN has room for in a row"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="ours: model.remat=dots and such"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where one more update's time goes"
    )
    parser.add_argument("--no_compile", action="store_true", help="torch without torch.compile")
    parser.add_argument("--limit_s", type=float, default=240, help="of one process")
    parser.add_argument("--json", default="", help="where to write all that was measured")
    args = parser.parse_args()
    rows: list[Row] = []
    for size in args.sizes.split(","):
        for side in args.sides.split(","):
            for mesh in args.mesh if side == "ours" else ["one"]:
                row = run(args, size, side, mesh)
                rows.append(row)
                print(json.dumps(row), flush=True)
                if args.json:
                    Path(args.json).write_text(json.dumps(rows, indent=1))
    print("\n".join(table(rows)))
    return 0 if all("error" not in row for row in rows) else 1


def run(args: argparse.Namespace, size: str, side: str, mesh: str) -> Row:
    """One process; what its last line says, or how it failed."""
    row: Row = {"size": size, "side": side, "mesh": mesh}
    words = ["--size", size, "--rows", args.rows, "--steps", args.steps, "--warm_up", args.warm_up]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    with tempfile.TemporaryDirectory() as folder:
        if side == "ours":
            words += ["--mesh", mesh, "--rows_per_microbatch", args.rows_per_microbatch]
            words += ["--segments", args.segments]
            words += [word for setting in args.set for word in ("--set", setting)]
            if args.profile:
                dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
                environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}".strip()
                words += ["--profile", folder]
        else:
            words += ["--profile"] * args.profile + ["--no_compile"] * args.no_compile
        command = [sys.executable, str(SUPPORT / f"update_{side}.py"), *map(str, words)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                text=True,
                timeout=args.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return row | {"error": f"not done in {args.limit_s:.0f} s (--limit_s)"}
    *before, last = done.stdout.strip().splitlines() or [""]
    if before:
        print(f"--- {side} {size} {mesh}", *before, sep="\n", flush=True)
    if done.returncode or not last.startswith("{"):
        return row | {"error": f"exit code {done.returncode}, see above: {last[:200]}"}
    told = json.loads(last)
    return row | (told if "step_s" in told else {**told, "error": "nothing fitted"})


def table(rows: list[Row]) -> list[str]:
    """Markdown: both sides, the goals, and predicted beside used memory."""
    good = [row for row in rows if "error" not in row]
    if not good:
        return ["nothing was measured"]
    rate = max(row["product_tflops"] for row in good)
    lines = [
        f"\n{good[0]['device']}, product rate {rate:.0f} TFLOP/s; {good[0]['tokens']} tokens an update; "
        + ", ".join(sorted({row["versions"] for row in good})),
        "| size | side | how | s an update (lowest–highest) | tokens/s | MFU | ours / torch | GiB | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    tflop = {row["size"]: row["tflop"] for row in good if "tflop" in row}
    verdicts = []
    for row in good:
        count = devices(row["mesh"])
        mfu = tflop.get(row["size"], float("nan")) / row["step_s"] / count / rate
        peer = _of(good, row["size"], "torch", "one")
        one = _of(good, row["size"], "ours", "one")
        ratio = f"{peer['step_s'] / row['step_s']:.2f}" if peer and row["side"] == "ours" else ""
        predicted = row.get("predicted_gib")
        lines.append(
            f"| {row['size']} | {row['side']}{'' if row['mesh'] == 'one' else ' ' + row['mesh']} | {row['what']} |"
            f" {row['step_s']:.3f} ({row['step_s_lowest']:.3f}–{row['step_s_highest']:.3f}) |"
            f" {row['tokens'] / row['step_s']:,.0f} | {mfu:.1%} | {ratio} | {row['peak_gib']:.1f} |"
            f" {f'{predicted:.1f}' if predicted else ''} |"
        )
        if row["side"] == "ours" and row["mesh"] == "one" and row["size"] in GOALS:
            goal = GOALS[row["size"]]
            verdicts.append(f"{row['size']}: MFU {mfu:.1%}, {_verdict(mfu >= goal)} {goal:.0%}")
        if one and row["mesh"] != "one":
            faster = one["step_s"] / row["step_s"]
            verdicts.append(
                f"{row['size']} {row['mesh']}: {faster:.2f} x one, {_verdict(faster >= SCALING)} {SCALING}"
            )
        if predicted and row["peak_gib"]:
            off = predicted / row["peak_gib"] - 1
            verdicts.append(
                f"{row['size']} {row['mesh']}: memory predicted {off:+.1%}, {_verdict(abs(off) <= PREDICTED)} ±10 %"
            )
    failed = [
        f"{row['size']} {row['side']} {row['mesh']}: {row['error']}"
        for row in rows
        if "error" in row
    ]
    return [*lines, "", *verdicts, *failed]


def devices(mesh: str) -> int:
    """Of "one", "fsdp=2" or "fsdp=2,tensor=2"."""
    count = 1
    for part in mesh.split(","):
        count *= int(part.partition("=")[2] or 1)
    return count


def _of(rows: list[Row], size: str, side: str, mesh: str) -> Row | None:
    wanted = (size, side, mesh)
    return next((r for r in rows if (r["size"], r["side"], r["mesh"]) == wanted), None)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
