"""Trajectories of a step, made by hand, and a config for their batches."""

from rollout_sidecar.protocol import Status, Trajectory
from tooljax import training_batch
from tooljax.batch import TrainBatch
from tooljax.config import Config
from tooljax.config.schema import BatchConfig, GrpoConfig
from tooljax.rollouts import Groups
from tooljax.store.store import Credit
from tooljax.update import Metrics

BATCH = BatchConfig(row_lengths=(8, 16), rows_per_microbatch=1, shared_prompts="off")


def trajectory(reward, *, sampled=2, status: Status = "completed", task=0, sample=0, scored=True):
    """Three prompt tokens, then `sampled` completion tokens and one observation token that is never trained on."""
    tokens = [5, 6, 7, *([9] * sampled), 8]
    return Trajectory(
        task_index=task,
        sample_index=sample,
        task_id=str(task),
        seed=0,
        status=status,
        token_ids=tokens,
        prompt_tokens=3,
        loss_mask=[False] * 3 + [True] * sampled + [False],
        rollout_log_probs=[0.0] * 3 + [-1.0] * sampled + [0.0],
        reward=reward,
        scored=scored,
    )


def config(**grpo):
    return Config(grpo=GrpoConfig(group_size=2, **grpo), batch=BATCH)


def make_batch(config: Config, groups: Groups) -> tuple[TrainBatch, Metrics, Credit]:
    """In rows of one length."""
    batch, metrics, credit = training_batch.make_batch(config, groups)
    assert isinstance(batch, TrainBatch)
    return batch, metrics, credit
