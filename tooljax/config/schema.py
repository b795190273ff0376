"""Every setting of a run: one tree of frozen dataclasses, a docstring under each field.

Defaults live here only, and in `judging`. Ranges are part of the type (`Annotated[float, Range(...)]`, see `types`), so
that the reader (`tooljax.config.gin`) reports a bad value with the line that set it. Standard library only: the
sidecar's host reads configs too, and has no JAX.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tooljax.config.algorithm import GrpoConfig as GrpoConfig
from tooljax.config.asynchronous import AsyncConfig as AsyncConfig
from tooljax.config.curriculum import CurriculumConfig as CurriculumConfig
from tooljax.config.judging import EvaluateConfig as EvaluateConfig
from tooljax.config.judging import GuardConfig as GuardConfig
from tooljax.config.lora import LoraConfig as LoraConfig
from tooljax.config.mesh import MeshConfig as MeshConfig
from tooljax.config.profile import ProfileConfig as ProfileConfig
from tooljax.config.types import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Range,
    Remat,
    Seconds,
)


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    dir: str = "runs/latest"
    """Folder for checkpoints, logs, trajectories and config.gin. A run that finds its checkpoints here goes on."""
    seed: CountOrZero = 0
    """Every random draw derives from (seed, step, prompt, sample, turn)."""
    steps: Count = 100
    """Optimizer steps (rollouts of one batch, then its updates) until the run ends."""
    progress: Literal["live", "plain", "off"] = "live"
    """Terminal display: a live table, one line a step, or nothing. Live falls back to plain without a terminal."""


@dataclass(frozen=True)
class ModelConfig:
    """The policy."""

    path: str = ""
    """Hugging Face folder: config.json, safetensors, tokenizer.json, chat template."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the trained weights and of what is sent to the engines. Softmax and log-probs are float32 always."""
    remat: Remat = "full"
    """What the backward pass computes again of each layer. none: nothing, all activations are kept; dots_attention:
    what is elementwise; dots: attention too; attention: all but attention; full: the layer. offload: as dots, with what
    is kept in the host's memory."""
    attention: Literal["auto", "plain", "blockwise", "cudnn", "splash"] = "auto"
    """What computes attention in the trainer: the best that can serve, or one by name. cudnn needs NVIDIA GPUs and
    bfloat16, splash TPUs; plain holds the scores of all pairs of a row, blockwise those of a block."""


@dataclass(frozen=True)
class DataConfig:
    """Where tasks come from."""

    train: tuple[str, ...] = ()
    """Parquet or JSONL files of verl records to train on."""
    eval: tuple[str, ...] = ()
    """Held-out files. Empty: no evaluation during training."""
    prompts_per_step: Count = 32
    """Groups in one batch."""
    shuffle: bool = True
    """Shuffle the training rows anew each epoch, from run.seed."""
    max_rows: CountOrZero = 0
    """Use only the first rows of each training file, 0 for all."""
    prompt_key: str = "prompt"
    """Column that holds the messages."""
    reward_key: str = "data_source"
    """Column that chooses the reward function."""


@dataclass(frozen=True)
class SamplingConfig:
    """How training rollouts are sampled."""

    temperature: NonNegative = 1.0
    """Divides the logits, in the engine and in the trainer alike. GRPO needs samples that differ: above 0."""
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    """Keep the smallest set of tokens with this much probability. Below 1 the trainer refuses to run: it does not
    replay the truncated support yet."""
    top_k: CountOrZero = 0
    """Keep this many tokens, 0 for all. Above 0 the trainer refuses to run, as for top_p."""


@dataclass(frozen=True)
class LimitsConfig:
    """Bounds of one trajectory. Nothing sampled is ever cut off afterwards."""

    max_turns: Count = 8
    """Assistant turns."""
    max_tokens_per_turn: Count = 512
    """Completion tokens of one turn."""
    max_trajectory_tokens: Count = 4096
    """Prompt, completion and observation tokens together."""
    max_prompt_tokens: Count = 2048
    """Longer prompts are rejected and counted, never truncated."""
    max_tool_result_tokens: Count = 1024
    """Longer tool results lose their middle."""
    max_parallel_calls: Count = 8
    """Calls of one turn beyond this are answered with "not executed"."""
    max_invalid_turns: Count = 3
    """Consecutive turns without one executable call, before the trajectory ends."""
    tool_timeout_s: Seconds = 80.0
    """Deadline of one tool call. Tools have shorter ones of their own; a sandbox that compiles for 30 s and runs for
    30 s takes 70 with its answer."""
    trajectory_timeout_s: Seconds = 600.0
    """Deadline of one trajectory."""


@dataclass(frozen=True)
class SidecarConfig:
    """The rollout sidecar: remote ones by URL, or one started here."""

    urls: tuple[str, ...] = ()
    """Base URLs of running sidecars, http or https. Empty: start one on this machine with the embedded engine. All must
    answer when a run starts; later, the work of one that is down goes to the others."""
    token_file: str = ""
    """File that holds the bearer token of the sidecars. Empty: no token."""
    ca_file: str = ""
    """PEM file of certificates that those of https sidecars may be signed by, beside what this machine trusts; their
    own where they signed themselves. Empty: what this machine trusts."""
    tool_config: tuple[str, ...] = ()
    """verl tool_config YAML files of the local sidecar, or Python files of @function_tool functions. Empty: none."""
    tool_format: str = "auto"
    """How the policy writes tool calls: auto (read from the chat template), hermes, llama3_json, ... as
    `python -m rollout_sidecar --help` lists them."""
    interaction_config: str = ""
    """verl interaction YAML of the local sidecar. Empty: none."""
    profile: Literal["default", "A", "B", "C"] = "default"
    """Whose semantics verl's files have: A up to 0.6, B 0.5 to 0.7, C from 0.8, or tooljax's own."""
    truncate_side: Literal["middle", "left", "right"] = "middle"
    """What a tool result that is too long loses; verl's tool_response_truncate_side."""
    max_tool_response_length: CountOrZero = 0
    """verl's limit of a tool result in characters, 0 for none. limits.max_tool_result_tokens counts tokens."""
    context_policy: Literal["keep", "fork", "reject"] = "keep"
    """Where the chat template would rewrite earlier turns: keep them as they were sampled, go on in a new token stream,
    or reject the trajectory."""
    slots: Count = 64
    """Trajectories that the embedded engine generates at once."""
    max_model_tokens: Count = 4096
    """Longest context of the embedded engine: its KV cache holds slots x this many tokens."""
    start_timeout_s: Seconds = 180.0
    """How long the local sidecar may take to load and compile."""
    share_gpu: bool = False
    """Trainer and engines use the same GPU in turns: engines give up weights and KV cache for the update. SGLang needs
    --memory_saver, and JAX gives memory back in between only with XLA_PYTHON_CLIENT_ALLOCATOR=platform."""
    quorum: Annotated[float, Range(above=0, high=1)] = 1.0
    """Share of a group's trajectories that must have ended before the others count as stragglers. 1 waits for all."""
    straggler_timeout_s: NonNegative = 30.0
    """How long stragglers may still take; then they are aborted, and their group is trained on without them."""
    request_timeout_s: Seconds = 3600.0
    """How long one batch of rollouts may take before the step fails."""
    down_timeout_s: Seconds = 600.0
    """How long a run waits, with no sidecar left that can be used, for one to come back before it fails."""
    in_flight: Literal["continue", "finish"] = "continue"
    """What a push of weights does to trajectories under way: they go on with the new ones after their token or turn, or
    they end with the old ones first, while new trajectories wait."""


@dataclass(frozen=True)
class RewardConfig:
    """reward = outcome + the weighted terms. Evaluations are scored by the outcome alone."""

    function: str = ""
    """The outcome: a built-in name, or path/to/file.py:function. Empty: chosen by each task's data_source."""
    function_kwargs: str = ""
    """JSON object: more arguments of that function, such as '{"format_score": 0.1}'. Chosen by data_source, a function
    gets those that it takes."""
    text: Literal["", "policy", "all"] = ""
    """What it reads as solution_str: what the policy wrote, or everything after the prompt, as in verl: a tool's text
    can then earn the reward. Empty: as sidecar.profile has it, which is policy unless it is one of verl's."""
    tool: float = 0.0
    """Weight of the rewards that tools return. 0 ignores them, and warns once a tool if there are any."""
    turn: float = 0.0
    """Weight of the scores that an interaction gives to turns. 0 as for tool."""
    turn_merge: Literal["sum", "mean", "last", "max"] = "sum"
    """How the scores of a trajectory's turns become one."""
    valid_call: float = 0.0
    """Added once to the reward of a trajectory that made a successful tool call: shaping against tool collapse."""
    invalid_call: float = 0.0
    """Times the share of calls that could not be executed (bad JSON, unknown tool, bad arguments). Usually negative."""
    anneal_steps: CountOrZero = 0
    """The four weights above fall linearly from their value at step 0 to 0 at this step. 0: they stay."""
    overlong: NonNegative = 0.0
    """The most that DAPO's soft over-long penalty takes off (arXiv:2503.14476, eq. 13). Not annealed."""
    overlong_buffer_tokens: CountOrZero = 0
    """That penalty grows over the last so many tokens before limits.max_trajectory_tokens. Prompt and observations
    count towards the limit, as everywhere."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: NonNegative = 1e-6
    """Peak, after warm-up."""
    warmup_steps: CountOrZero = 10
    """Updates in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After warm-up. Cosine falls to a tenth at the last step."""
    weight_decay: NonNegative = 0.01
    """Decoupled; not applied to norm scales and biases."""
    b1: Annotated[float, Range(low=0, below=1)] = 0.9
    """Decay of the first moment."""
    b2: Annotated[float, Range(low=0, below=1)] = 0.99
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    clip_norm: Positive = 1.0
    """Global gradient norm above which gradients are scaled down."""
    rounding: Literal["master", "stochastic"] = "master"
    """How bfloat16 weights take steps that are too small for them. master: float32 master weights stand beside them,
    4 bytes a weight. stochastic: there are none, and each weight is rounded up or down at random, right on average."""
    offload: bool = False
    """Moments and master weights are in the host's memory, and come to the devices layer by layer in each update:
    8 to 12 bytes a weight there and back."""


@dataclass(frozen=True)
class BatchConfig:
    """How token streams become arrays of static shape."""

    row_lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Ladder of row lengths; a batch uses the smallest that holds its longest trajectory. One compilation each."""
    mixed_lengths: bool = False
    """A batch has rows of several of these lengths, chosen for little padding; a microbatch has one. At most four."""
    rows_per_microbatch: Count = 8
    """Rows whose gradients are computed at once; the others of the batch are accumulated."""
    shared_prompts: Literal["auto", "off"] = "off"
    """auto: the trajectories of a group share their prompt's tokens, which a row computes once for all in it, in
    batches that take at least 5 % less time so, by their token counts. Loss and gradients stay the same. Such batches
    are compiled beside those that share nothing: one compilation more for each row length."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving."""

    every_steps: Count = 50
    """Steps between checkpoints. The last step, and Ctrl-C, save too."""
    keep: Count = 2
    """Newest checkpoints kept."""
    background: bool = True
    """Go on training while a checkpoint is written, from a copy in host memory. Off: wait until it is on the disk."""
    grace_s: Seconds = 30.0
    """How long the run may go on after SIGTERM or Ctrl-C. What sidecars have not answered in half of it is given up, to
    save in the other half. Set it to what the scheduler waits before it kills."""


@dataclass(frozen=True)
class SftConfig:
    """The cold start: next-token loss on demonstrations, assistant tokens only."""

    demonstrations: tuple[str, ...] = ()
    """JSONL or parquet files; each row has messages, and tools (schemas) if it uses any."""
    output: str = ""
    """Hugging Face folder to write. Empty: <run.dir>/sft."""
    steps: Count = 200
    """Optimizer steps."""
    conversations_per_step: Count = 64
    """Demonstrations in one step."""
    learning_rate: Positive = 1e-5
    """Peak; warm-up, schedule and the rest come from the optimizer section."""


@dataclass(frozen=True)
class WeightsConfig:
    """The push to the sidecars."""

    mode: Literal["delta", "full"] = "delta"
    """Send the bfloat16 elements whose bits changed since the last acknowledged version, or all. Delta keeps a copy of
    the weights on the devices and one on the host; float32 weights are always sent whole."""
    part_bytes: Annotated[int, Range(low=1024)] = 33_554_432
    """Size of one HTTP part of the payload."""
    timeout_s: Seconds = 600.0
    """How long one push may take before the step fails."""


@dataclass(frozen=True)
class GateConfig:
    """The log-prob gate: trainer and engines score the same sampled tokens, and a run whose sides disagree stops."""

    every_pushes: CountOrZero = 1
    """Pushes of weights between two looks; the first push of a run is always looked at. 0: no gate."""
    prompts: Count = 8
    """Tasks, the first of data.train, of which every sidecar samples one turn for it."""
    max_tokens: Count = 64
    """Tokens of each, and at most limits.max_tokens_per_turn."""
    max_mean_kl: NonNegative = 0.0
    """The run stops above this mean KL between engine and trainer, in nats a token. 0 chooses by model.dtype: 1e-5 for
    float32, where sound engines have 1e-10 (1e-6 with TF32 products), and 5e-3 for bfloat16, some times the 1e-3 that
    its 8 bits cost: 3e-4 by rounding logits alone."""
    max_rms: NonNegative = 0.0
    """The same for the root mean square of the log-probs' differences, in nats. 0: no limit of its own."""


@dataclass(frozen=True)
class TrackConfig:
    """Where metrics go. metrics.jsonl is always written."""

    tensorboard: bool = True
    """Scalars and sample conversations under <run.dir>/tensorboard."""
    mlflow: bool = False
    """Needs the mlflow extra; MLFLOW_TRACKING_URI says where, default <run.dir>/mlflow.db."""
    wandb: bool = False
    """Needs the wandb extra; WANDB_MODE=offline works."""
    project: str = "tooljax"
    """Experiment (MLflow) or project (WandB)."""
    samples_per_step: CountOrZero = 2
    """Conversations written as text at each logged step."""


@dataclass(frozen=True)
class StoreConfig:
    """Every trajectory, token for token, under <run.dir>/trajectories: what `python -m tooljax.replay` reads."""

    enabled: bool = True
    """Write each step. Off, a run cannot be replayed."""
    compression_level: Annotated[int, Range(low=1, high=22)] = 3
    """zstd's: 1 is fast, 19 small."""
    keep_steps: CountOrZero = 0
    """Newest steps kept, 0 for all. A step takes about 2 bytes for each token in it, 8 for each that was sampled, and
    its texts once, compressed."""


@dataclass(frozen=True)
class Config:
    """All sections of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    sidecar: SidecarConfig = field(default_factory=SidecarConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    """`async` in configs; Python keeps that word for itself."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
