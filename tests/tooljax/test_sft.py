"""The cold start: what is learned from, what is left out, that it learns, and what its command says."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.config import Config
from tooljax.config.schema import (
    BatchConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SftConfig,
)
from tooljax.model import hf, tiny
from tooljax.sft import cold_start, main

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]


def demonstration(i: int) -> dict:
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"x": "{i}"}}}}\n</tool_call>'
    return {
        "messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": call},
            {"role": "tool", "content": str(i)},
            {"role": "assistant", "content": f"#### {i}"},
        ],
        "tools": TOOLS,
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a model and demonstrations."""
    folder = tmp_path_factory.mktemp("world")
    rows = "".join(json.dumps(demonstration(i)) + "\n" for i in range(16))
    (folder / "demonstrations.jsonl").write_text(rows)
    texts = tiny.chat_texts(folder / "demonstrations.jsonl")
    tiny.build(folder / "model", texts, vocab=320, embed=64, layers=1, seed=0)
    return folder


def config(world, output, *, steps: int = 12, **sft) -> Config:
    return Config(
        run=RunConfig(seed=1, progress="plain"),
        model=ModelConfig(path=str(world / "model"), dtype="float32", remat="none"),
        optimizer=OptimizerConfig(warmup_steps=0),
        batch=BatchConfig(row_lengths=(128,), rows_per_microbatch=4),
        mesh=MeshConfig(fsdp=1),
        sft=SftConfig(
            demonstrations=(str(world / "demonstrations.jsonl"),),
            output=str(output),
            steps=steps,
            **{"conversations_per_step": 8, "learning_rate": 3e-3, **sft},
        ),
    )


def losses(printed: str) -> list[float]:
    return [
        float(part.removeprefix("loss "))
        for line in printed.splitlines()
        for part in line.split(" | ")
        if part.startswith("loss ")
    ]


def token_losses(folder, i: int) -> tuple[list[float], list[float]]:
    """Negative log-likelihoods in demonstration i under the model of a folder: what assistants said, and the rest."""
    tokenizer = ChatTokenizer.from_folder(folder)
    call, answer = (demonstration(i)["messages"][k]["content"] + "<|im_end|>" for k in (1, 3))
    # The pieces as they would arrive in a rollout.
    question = f"<|im_start|>system\n<tool_call> f(x)<|im_end|>\n<|im_start|>user\nWhat is {i}?"
    result = f"\n<|im_start|>user\n<tool_response>\n{i}\n</tool_response><|im_end|>\n"
    opening = "<|im_start|>assistant\n"
    pieces = [
        (question + "<|im_end|>\n" + opening, False),
        (call, True),
        (result + opening, False),
        (answer, True),
    ]
    tokens = [(token, said) for text, said in pieces for token in tokenizer.encode(text)]
    ids = jnp.asarray([token for token, _ in tokens])[None]
    decoder = hf.load(folder, "float32")
    hidden = decoder.hidden(ids, jnp.arange(len(tokens))[None], jnp.ones_like(ids))
    logits = np.asarray(hidden @ decoder.head_weight().T, np.float64)[0]
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    values = [(-log_probs[t - 1, tokens[t][0]], tokens[t][1]) for t in range(1, len(tokens))]
    return [v for v, said in values if said], [v for v, said in values if not said]


def test_it_learns_what_assistants_say_and_nothing_else(world, tmp_path, capsys):
    output = cold_start(config(world, tmp_path / "out"))
    found = losses(capsys.readouterr().out)
    assert len(found) == 12
    # From near uniform over some 300 tokens (ln 300 = 5.7) to less than half.
    assert found[0] > 4.5
    assert found[-1] < found[0] / 2
    # From there, another cold start on all of them begins with exactly the mean over what the assistants said.
    again = config(world, tmp_path / "again", steps=1, conversations_per_step=16)
    again = replace(again, model=replace(again.model, path=str(output)))
    cold_start(again)
    (first,) = losses(capsys.readouterr().out)
    values = [token_losses(output, i) for i in range(16)]
    spoken, read = (np.concatenate([pair[k] for pair in values]) for k in (0, 1))
    assert first == pytest.approx(np.mean(spoken), rel=6e-3)  # printed with three digits
    # Questions, tools and their answers were only read.
    assert np.mean(read) > 2 * np.mean(spoken)


def test_the_result_is_a_folder_like_the_one_it_came_from_and_repeats_to_the_bit(world, tmp_path):
    first, second = (cold_start(config(world, tmp_path / n, steps=2)) for n in ("a", "b"))
    source = world / "model"
    assert {f.name for f in first.iterdir()} == {f.name for f in source.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (first / name).read_bytes() == (source / name).read_bytes()
    weights = [(folder / "model.safetensors").read_bytes() for folder in (source, first, second)]
    assert weights[0] != weights[1] == weights[2]


def test_the_output_is_in_the_runs_folder_unless_named(world, tmp_path):
    asked = config(world, "", steps=1)
    asked = replace(asked, run=RunConfig(dir=str(tmp_path / "run"), progress="off"))
    assert cold_start(asked) == tmp_path / "run" / "sft"
    assert (tmp_path / "run" / "sft" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.path={world}/model"], "name their files in sft.demonstrations"),
        (["sft.demonstrations=('{world}/demonstrations.jsonl',)"], "model.path is empty"),
        (
            [
                "model.path={world}/model",
                "sft.demonstrations=('{world}/demonstrations.jsonl',)",
                "sft.conversations_per_step=17",
            ],
            "sft.conversations_per_step=17 does not fit 16 demonstrations",
        ),
        (
            [
                "model.path={world}/model",
                "sft.demonstrations=('{world}/demonstrations.jsonl',)",
                "sft.conversations_per_step=4",
                "limits.max_trajectory_tokens=8",
                "limits.max_prompt_tokens=4",
                "batch.row_lengths=(8,)",
            ],
            "fits no row",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(world, tmp_path, capsys, settings, sentence):
    asked = [setting.replace("{world}", str(world)) for setting in settings]
    asked += [f"run.dir={tmp_path}", "run.progress=off", "model.dtype=float32"]
    assert main([part for setting in asked for part in ("--set", setting)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tooljax.sft: ")
    assert sentence in error
    assert error.count("\n") == 1
