"""Writes TensorBoard event files with the tensorboard package alone: no TensorFlow, no torch.

Scalars are written as simple values, which every reader of event files understands; texts for the text dashboard,
which shows markdown.
"""

# The classes of protobuf modules exist at run time only.
# pyright: reportAttributeAccessIssue=false

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardWriter:
    """One event file in `dir`. With `resume_step`, readers forget what earlier files say of later steps."""

    def __init__(self, dir: str | Path, *, resume_step: int | None = None):
        self._writer = EventFileWriter(str(dir))
        if resume_step is not None:
            # Readers drop events with a step at or above this one's.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(wall_time=time.time(), step=resume_step + 1, session_log=start)
            )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes all values of a step."""
        self._add(step, [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Writes a text for the text dashboard."""
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[markdown.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = create_summary_metadata(display_name=None, description=None)
        self._add(step, [Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

    def flush(self) -> None:
        """Returns when all is on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()

    def _add(self, step: int, values: list) -> None:
        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
