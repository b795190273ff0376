"""The typed config of a run and its gin-style reader. Standard library only."""

from tooljax.config.cli import parse_args as parse_args
from tooljax.config.errors import ConfigError as ConfigError
from tooljax.config.gin import load_config as load_config
from tooljax.config.gin import to_gin as to_gin
from tooljax.config.schema import BatchConfig as BatchConfig
from tooljax.config.schema import CheckpointConfig as CheckpointConfig
from tooljax.config.schema import Config as Config
from tooljax.config.schema import DataConfig as DataConfig
from tooljax.config.schema import EvaluateConfig as EvaluateConfig
from tooljax.config.schema import GrpoConfig as GrpoConfig
from tooljax.config.schema import LimitsConfig as LimitsConfig
from tooljax.config.schema import ModelConfig as ModelConfig
from tooljax.config.schema import OptimizerConfig as OptimizerConfig
from tooljax.config.schema import RewardConfig as RewardConfig
from tooljax.config.schema import RunConfig as RunConfig
from tooljax.config.schema import SamplingConfig as SamplingConfig
from tooljax.config.schema import SftConfig as SftConfig
from tooljax.config.schema import SidecarConfig as SidecarConfig
from tooljax.config.schema import TrackConfig as TrackConfig
from tooljax.config.schema import WeightsConfig as WeightsConfig
