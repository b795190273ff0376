"""What process 0 of a run tells the others, message by message, each to all of them.

A message waits in the store of JAX's coordinator, where waiting for it takes no device: a rollout may take an hour, and
a collective that long would be given up, or could not be interrupted. A long one only says its length there, and
then goes through the devices, in pieces of one size, so that one program is compiled for all of them.
"""

import pickle
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tooljax.distributed import is_first, store

SHORT_BYTES = 4096
PIECE_BYTES = 2**22
WAIT_MS = 1000
"""For a message, before signals are looked at."""


class Channel:
    """One direction: from process 0. Every process must make the same calls in the same order."""

    def __init__(self, *, short_bytes: int = SHORT_BYTES, piece_bytes: int = PIECE_BYTES):
        """Messages of up to `short_bytes` stay in the store; others go in pieces of `piece_bytes`."""
        self._short_bytes = short_bytes
        self._piece_bytes = piece_bytes
        self._number = 0
        self._kept = 0
        """The first message that may still be in the store."""

    def tell(self, message: Any) -> None:
        """To be called by process 0."""
        data = pickle.dumps(message, protocol=5)
        key = _key(self._number)
        if len(data) <= self._short_bytes:
            store().key_value_set_bytes(key, b"!" + data)
        else:
            store().key_value_set_bytes(key, str(len(data)).encode())
            self._through_devices(len(data), np.frombuffer(data, np.uint8))
            # Everybody has come this far.
            for number in range(self._kept, self._number + 1):
                store().key_value_delete(_key(number))
            self._kept = self._number + 1
        self._number += 1

    def hear(self) -> Any:
        """The next message, in any other process."""
        found = self._waited_for(_key(self._number))
        self._number += 1
        if found[:1] == b"!":
            return pickle.loads(found[1:])
        return pickle.loads(self._through_devices(int(found), None).data)

    def _waited_for(self, key: str) -> bytes:
        while True:
            asked = time.monotonic()
            try:
                return store().blocking_key_value_get_bytes(key, WAIT_MS)
            except jax.errors.JaxRuntimeError:
                if time.monotonic() - asked < WAIT_MS / 2000:  # not that it took too long
                    raise

    def _through_devices(self, nbytes: int, data: np.ndarray | None) -> np.ndarray:
        out = np.zeros(-(-nbytes // self._piece_bytes) * self._piece_bytes, np.uint8)
        if data is not None:
            out[:nbytes] = data
        for start in range(0, nbytes, self._piece_bytes):
            piece = slice(start, start + self._piece_bytes)
            out[piece] = multihost_utils.broadcast_one_to_all(out[piece], is_source=is_first())
        return out[:nbytes]


def _key(number: int) -> str:
    return f"tooljax/told/{number}"
