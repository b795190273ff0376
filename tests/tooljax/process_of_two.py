"""One of the processes of test_two_processes: python process_of_two.py <rank> <port> <folder>; prints its metrics."""

import json
import sys
from pathlib import Path

import jax

rank, port, folder = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_disable_most_optimizations", True)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(rank))

# After that, because a process must not use its devices before it knows the others.
from policy_mesh_cases import opened, settings, small_batch  # noqa: E402

from tooljax.channel import Channel  # noqa: E402

policy, updater = opened(settings(Path(folder), data=2, fsdp=2))
state, metrics = updater.update(updater.init(policy.params), small_batch())
log_probs = updater.log_probs(state.params, small_batch())
held = sum(
    part.data.nbytes for x in jax.tree.leaves(policy.params) for part in x.addressable_shards
)
policy.save(state.params, Path(folder).with_name("saved"))
channel = Channel(short_bytes=30, piece_bytes=64)
messages = ["short", b"longer " * 50, {"seventy": "bytes " * 10}, "short again"]
if rank == "0":
    for message in messages:
        channel.tell(message)
heard = messages if rank == "0" else [channel.hear() for _ in messages]
print(
    json.dumps(
        {
            "metrics": metrics,
            "log_probs": log_probs.tolist(),
            "devices": len(jax.devices()),
            "held": held,
            "heard": heard == messages,
            "whole": sum(x.nbytes for x in jax.tree.leaves(policy.params)),
        }
    )
)
