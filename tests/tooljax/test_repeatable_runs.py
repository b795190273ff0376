"""A run on the embedded engine is the same to the last bit, however long its tools take."""

import asyncio
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_cases import make_config, make_folder
from served_sidecars import serve

from rollout_sidecar.engines.jax import JaxEngine
from rollout_sidecar.formats.base import ParsedCall
from rollout_sidecar.formats.hermes import HermesFormat
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool, ToolResponse
from rollout_sidecar.tools.gate import ToolGate
from tooljax.config.schema import (
    BatchConfig,
    DataConfig,
    GateConfig,
    GrpoConfig,
    LimitsConfig,
    OptimizerConfig,
    RunConfig,
    TrackConfig,
)
from tooljax.policy import make_updater
from tooljax.rollouts import Sidecars
from tooljax.train import train
from tooljax.update import Updater

pytestmark = pytest.mark.timeout(180)
"""The runs compile a model, which a busy machine does slowly."""

STEPS, PROMPTS, SAMPLES = 2, 2, 4

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return len(set(solution_str)) / 20
"""


class EveryTurnCalls(HermesFormat):
    """Reads a call in whatever a random model writes, up to the first of these."""

    stop_texts = tuple("0123456789abcde")

    def parse(self, text: str, **kwargs: Any) -> list[ParsedCall]:
        return [ParsedCall("measure", {"length": len(text)}, text)]


class Measure(BaseTool):
    """Says how long the text was, after a time that is drawn anew for every call."""

    def __init__(self):
        properties = {"length": {"type": "integer"}}
        function = {
            "name": "measure",
            "parameters": {"type": "object", "properties": properties},
        }
        super().__init__({}, {"type": "function", "function": function})
        self.delays = random.Random(0)
        self.answered: list[str] = []
        """Whom, in this order, by their place in the request."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.sleep(self.delays.uniform(0.0, 0.15))
        self.answered.append(instance_id.partition(":")[2])
        return ToolResponse(text=str(parameters["length"])), 0.0, {}


@pytest.fixture
def one_updater(monkeypatch):
    """Both runs have the same one: it compiles once."""
    made: list[Updater] = []

    def make(*args: Any, **kwargs: Any) -> Updater:
        made.extend([] if made else [make_updater(*args, **kwargs)])
        return made[0]

    monkeypatch.setattr("tooljax.train.make_updater", make)


@pytest.mark.usefixtures("one_updater")
def test_tools_that_answer_in_another_order_change_no_bit_of_a_run(tmp_path):
    folder = make_folder(tmp_path / "model", layers=1)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": [{"role": "user", "content": f"Problem {i}?"}], "data_source": "x"}
        for i in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make_config(
        folder,
        data=DataConfig(train=(str(tmp_path / "train.jsonl"),), prompts_per_step=PROMPTS),
        grpo=GrpoConfig(group_size=SAMPLES, zero_variance="keep"),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        limits=LimitsConfig(
            max_turns=3, max_tokens_per_turn=24, max_prompt_tokens=80, max_trajectory_tokens=256
        ),
        batch=BatchConfig(row_lengths=(256,), rows_per_microbatch=4),
        gate=GateConfig(every_pushes=0),
        track=TrackConfig(tensorboard=False),
    )
    tool = Measure()
    orders = []

    def engine(tokenizer: ChatTokenizer, script: object) -> Any:
        # Fewer slots than trajectories: who gets one, and when, is a matter of timing too.
        return JaxEngine(str(folder), dtype="float32", slots=6, max_model_tokens=256)

    with serve(ChatTokenizer.from_folder(folder), [], engine=engine) as (served,):
        agent = served.sidecar.agent
        agent.tool_format = EveryTurnCalls()
        agent.tools, agent.gates = {"measure": tool}, {"measure": ToolGate("measure")}
        agent.scorer = Scorer(reward=f"{tmp_path / 'reward.py'}:compute_score")
        for name in ("once", "again"):
            run = RunConfig(dir=str(tmp_path / name), steps=STEPS, progress="off")
            with Sidecars([served.url], token=None, timeout_s=60.0) as sidecars:
                assert train(replace(config, run=run), sidecars) == STEPS
            orders.append(tool.answered)
            tool.answered, tool.delays = [], random.Random(1)
    once, again = orders
    assert len(once) == len(again) > STEPS * PROMPTS * SAMPLES / 2
    assert once != again
    found = metrics(tmp_path / "once")
    assert found == metrics(tmp_path / "again")
    assert all(row["optim/grad_norm"] > 0 and row["reward/std"] > 0 for row in found)
    assert weights(tmp_path / "once") == weights(tmp_path / "again") != weights(folder, policy="")


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Without what a clock says, and what is compiled."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    others = re.compile(r"_s(/|$)|perf/compilations|policy/version")
    return [{k: v for k, v in row.items() if not others.search(k)} for row in rows]


def weights(run_dir: Path, policy: str = "policy") -> bytes:
    return (run_dir / policy / "model.safetensors").read_bytes()
