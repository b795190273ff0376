"""verl's interaction files, unchanged: names, classes, users' own code, and what is wrong in a sentence."""

from pathlib import Path

import pytest
from sidecar_cases import make_agent, make_task, play

from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.interactions.gsm8k import Gsm8kInteraction
from rollout_sidecar.interactions.registry import load_interactions

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    file = folder / "interaction.yaml"
    file.write_text(text)
    return file


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """A module of a user of verl."""
    (tmp_path / "my_interactions.py").write_text(
        "from verl.interactions.base import BaseInteraction\n"
        "\n"
        "class PoliteInteraction(BaseInteraction):\n"
        "    def __init__(self, config: dict):\n"
        "        super().__init__(config)\n"
        "        self.words = config['words']\n"
        "\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        return len(messages) > 3, f\"{self.name}: {self.words} {kwargs['query']}\", 0.5, {}\n"
        "\n"
        "class Broken(BaseInteraction):\n"
        "    def __init__(self, config):\n"
        "        raise KeyError('words')\n"
        "\n"
        "class Other:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_verl_s_stock_file(tmp_path):
    file = write(
        tmp_path,
        "interaction:\n"
        '  - name: "gsm8k"\n'
        '    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"\n'
        "    config: {}\n",
    )
    interactions = load_interactions(file)
    assert list(interactions) == ["gsm8k"]
    assert isinstance(interactions["gsm8k"], Gsm8kInteraction)
    assert interactions["gsm8k"].name == "gsm8k"


def test_names_come_from_the_class_and_empty_keys_are_absent(tmp_path, users_module):
    file = write(
        tmp_path,
        "interaction:\n"
        "  - {class_name: rollout_sidecar.interactions.gsm8k.Gsm8kInteraction, name: , config: }\n"
        "  - {class_name: my_interactions.PoliteInteraction, config: {words: Please}}\n",
    )
    interactions = load_interactions(str(file))
    assert list(interactions) == ["gsm8k", "polite"]
    assert interactions["polite"].config == {"words": "Please", "name": "polite"}


async def test_a_user_s_class_written_for_verl_plays_a_trajectory(
    tmp_path, users_module, tiny_tokenizer
):
    file = write(
        tmp_path,
        "interaction:\n"
        "  - {name: p, class_name: my_interactions.PoliteInteraction, config: {words: Please}}\n",
    )
    agent = make_agent(tiny_tokenizer, ["#### 3", "#### 2"])
    agent.interactions = load_interactions(file)
    assert isinstance(agent.interactions["p"], BaseInteraction)
    kwargs = {"name": "p", "query": "count"}
    trajectory = await play(agent, make_task(interaction="p", interaction_kwargs=kwargs))
    assert trajectory.status == "completed"
    assert trajectory.messages[2] == {"role": "user", "content": "p: Please count"}
    assert [turn.reply.score for turn in trajectory.turns if turn.reply] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("interaction: 5\n", r"expected a list under the key `interaction`"),
        ("tools: []\n", r"expected a list under the key `interaction`"),
        ("interaction: [\n", r"is not valid YAML"),
        ("interaction: [gsm8k]\n", r"interaction\[0\]: expected a mapping with class_name"),
        ("interaction: [{name: a}]\n", r"interaction\[0\]: class_name is missing"),
        ("interaction: [{class_name: a.B, nmae: c}]\n", r"unknown key 'nmae'; an entry has name,"),
        ("interaction: [{class_name: a.B, config: 3}]\n", r"config must be a mapping, got 3"),
        ("interaction: [{class_name: no_such.B}]\n", r"cannot import no_such for class_name"),
        (
            "interaction: [{class_name: my_interactions.Other}]\n",
            r"my_interactions.Other is not an interaction: it lacks start_interaction, generate",
        ),
        (
            "interaction: [{class_name: my_interactions.Broken}]\n",
            r"my_interactions.Broken could not be made: KeyError\('words'\)",
        ),
        (
            "interaction:\n"
            "  - {class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}\n"
            "  - {name: gsm8k, class_name: my_interactions.PoliteInteraction, config: {words: a}}\n",
            r"interaction\[1\]: an interaction named 'gsm8k' comes earlier in the file",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, users_module, text, problem):
    with pytest.raises(ValueError, match=problem):
        load_interactions(write(tmp_path, text))


OURS = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
LLM_USER = "rollout_sidecar.interactions.llm_user.LlmUserInteraction"


@pytest.mark.parametrize(
    ("class_name", "key", "hint"),
    [
        (LLM_USER, "modle", "did you mean 'model'?"),
        (LLM_USER, "colour", "there are: api_key_env, base_url, done_marker,"),
        (LLM_USER, "name", "there are: api_key_env"),  # the entry's own, beside `config`
        (OURS, "statless", "did you mean 'stateless'?"),
        (OURS, "ground_truth", "there are: stateless"),
    ],
)
def test_a_key_that_one_of_ours_does_not_read_is_an_error(tmp_path, class_name, key, hint):
    file = write(tmp_path, f"interaction: [{{class_name: {class_name}, config: {{{key}: x}}}}]\n")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_interactions(file)
    assert str(caught.value).startswith(f"{file}: interaction[0]: unknown key config.{key}; {hint}")


def test_keys_of_every_interaction_and_of_users_are_let_through(tmp_path, users_module):
    (tmp_path / "stricter.py").write_text(
        "from rollout_sidecar.interactions.gsm8k import Gsm8kInteraction\n"
        "\n"
        "class Stricter(Gsm8kInteraction):\n"
        "    pass\n"
    )
    file = write(
        tmp_path,
        "interaction:\n"
        f"  - {{class_name: {OURS}, config: {{stateless: true}}}}\n"
        "  - {class_name: stricter.Stricter, config: {patience: 3}}\n"
        f"  - {{class_name: {LLM_USER}, config:"
        " {base_url: 'http://127.0.0.1:9', model: m, stateless: true}}\n",
    )
    made = load_interactions(file)
    assert [one.config.get("stateless") for one in made.values()] == [True, None, True]
    assert made["stricter"].config["patience"] == 3


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml: no such interaction file"):
        load_interactions(tmp_path / "none.yaml")


@pytest.mark.parametrize("file", sorted((ROOT / "configs/interactions").glob("*.yaml")), ids=str)
def test_shipped_files_load(file):
    assert load_interactions(file)
