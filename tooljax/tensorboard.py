"""Writes TensorBoard event files with the tensorboard package alone: no TensorFlow, no torch.

Scalars are written as simple values and histograms as such, which every reader of event files understands; texts for
the text dashboard, which shows markdown; a layout for the custom scalars dashboard; settings for the one of
hyperparameters.
"""

# The classes of protobuf modules exist at run time only.
# pyright: reportAttributeAccessIssue=false

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tooljax.histograms import Values, buckets

Layout = Sequence[tuple[str, Sequence[tuple[str, Sequence[str]]]]]
"""Sections from top to bottom; of each its charts; of each chart the tags of its curves."""


STORY: Layout = (
    (
        "Does it learn?",
        (
            ("Reward", ("reward/mean", "reward/terms/outcome/mean")),
            ("Accuracy, held-out and in training", ("eval/accuracy", "rollout/accuracy")),
            ("Groups that teach nothing", ("reward/zero_variance_group_frac",)),
        ),
    ),
    (
        "Does it use tools?",
        (
            (
                "Trajectories with a call, calls that succeeded",
                ("tools/use_rate", "tools/valid_call_rate"),
            ),
            (
                "Accuracy with and without a call",
                ("rollout/accuracy_with_tools", "rollout/accuracy_without_tools"),
            ),
            (
                "Calls and turns of a trajectory",
                ("tools/calls_per_trajectory", "rollout/turns/mean"),
            ),
        ),
    ),
    (
        "Is it sound?",
        (
            ("KL between engine and trainer", ("policy/kl_mismatch",)),
            ("Entropy", ("policy/entropy",)),
            ("KL to the reference", ("policy/kl_ref",)),
            ("Norm of the gradient", ("optim/grad_norm",)),
            ("Trajectories cut short", ("rollout/truncated_frac",)),
            ("Alarms", ("guard/alarms",)),
        ),
    ),
    (
        "Is it fast?",
        (
            ("Tokens per second", ("perf/tokens_per_s",)),
            (
                "Seconds of a step",
                ("time/step_s", "time/rollout_s", "time/update_s", "time/push_s"),
            ),
            (
                "Seconds that each part works",
                ("perf/trainer_busy_s", "perf/engine_busy_s", "perf/tools_busy_s"),
            ),
            (
                "Seconds of a trajectory",
                (
                    "rollout/trajectory_s/max",
                    "rollout/trajectory_s/mean",
                    "rollout/tool_s/mean",
                ),
            ),
        ),
    ),
)
"""What TensorBoard's custom scalars dashboard shows, from top to bottom."""

RESULTS = (
    "eval/accuracy",
    "reward/mean",
    "tools/use_rate",
    "policy/kl_mismatch",
    "perf/tokens_per_s",
)
"""What stands beside a run's settings in TensorBoard's table of hyperparameters."""


_TYPES = {
    "bool": api_pb2.DATA_TYPE_BOOL,
    "number": api_pb2.DATA_TYPE_FLOAT64,
    "string": api_pb2.DATA_TYPE_STRING,
}


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

    def histogram(self, step: int, tag: str, values: Values) -> None:
        """Writes how values are spread: at least one, all finite."""
        counts, edges = buckets(values)
        histogram = HistogramProto(
            min=values.min(),
            max=values.max(),
            num=values.size,
            sum=values.sum(),
            sum_squares=np.square(values).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        self._add(step, [Summary.Value(tag=tag, histo=histogram)])

    def layout(self, step: int, layout: Layout) -> None:
        """Says which curves the custom scalars dashboard draws together."""
        categories = [
            layout_pb2.Category(
                title=title,
                chart=[
                    layout_pb2.Chart(
                        title=name,
                        # Tags are patterns there.
                        multiline=layout_pb2.MultilineChartContent(
                            tag=[f"^{re.escape(tag)}$" for tag in tags]
                        ),
                    )
                    for name, tags in charts
                ],
            )
            for title, charts in layout
        ]
        told = layout_pb2.Layout(category=categories).SerializeToString()
        tensor = TensorProto(dtype=DT_STRING, string_val=[told], tensor_shape=TensorShapeProto())
        tag, metadata = (
            layout_metadata.CONFIG_SUMMARY_TAG,
            layout_metadata.create_summary_metadata(),
        )
        self._add(step, [Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])

    def hparams(
        self, step: int, settings: Mapping[str, bool | float | str], metrics: Sequence[str]
    ) -> None:
        """Writes a run's settings, and the tags of the scalars to be shown beside them: the last value of each."""
        kinds = {name: _kind(value) for name, value in settings.items()}
        names = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag, group="")) for tag in metrics]
        experiment = api_pb2.Experiment(
            hparam_infos=[
                api_pb2.HParamInfo(name=name, type=_TYPES[kind]) for name, kind in kinds.items()
            ],
            metric_infos=names,
        )
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in settings.items():
            setattr(start.hparams[name], f"{kinds[name]}_value", value)
        for tag, data in (
            (hparams_metadata.EXPERIMENT_TAG, {"experiment": experiment}),
            (hparams_metadata.SESSION_START_INFO_TAG, {"session_start_info": start}),
        ):
            metadata = hparams_metadata.create_summary_metadata(
                plugin_data_pb2.HParamsPluginData(**data)
            )
            tensor = hparams_metadata.NULL_TENSOR
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


def _kind(value: bool | float | str) -> str:
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, int | float) else "string"
