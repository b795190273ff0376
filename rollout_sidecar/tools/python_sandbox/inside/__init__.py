"""What runs in a worker's process, on the other side of the wall. Standard library only: none of our dependencies, and
not even the interpreter that runs the sidecar, need be there.

    zygote ─ supervisor ─┃─ init ─ program          ┃ is the wall; a new supervisor, init and program for each call
    (caps)   (caps)      ┃ (no caps, filtered)

The zygote never sees a call's data, so nothing of one call is in the memory from which the next is forked.
"""
