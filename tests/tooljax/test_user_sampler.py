"""Samplers of users with verl's contract, from files that import verl, which is not installed."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from curriculum_cases import (
    advance,
    assert_interruption_takes_nothing,
    assert_resumes_exactly,
    group,
    make_config,
    make_tasks,
    saved,
)

from tooljax.compat.options import translate
from tooljax.config import Config
from tooljax.curriculum.source import open_source

IN_ORDER = """
    from verl.experimental.dataset.sampler import AbstractSampler

    class Sampler(AbstractSampler):
        def __init__(self, data_source, data_config):
            self.rows = list(range(len(data_source)))

        def __iter__(self):
            return iter(self.rows)
"""

EASIEST_FIRST = """
    from collections.abc import Sized

    import numpy as np
    from omegaconf import DictConfig
    from verl import DataProto
    from verl.experimental.dataset.sampler import AbstractCurriculumSampler

    class Sampler(AbstractCurriculumSampler):
        '''The rows of the highest mean score first; of equal ones those of the lowest level.'''

        def __init__(self, data_source: Sized, data_config: DictConfig):
            assert data_config.sampler.class_name == "Sampler"
            self.size = data_config.get("train_batch_size")
            self.offset = {"low": 0, "high": len(data_source) // 2}
            self.score = np.array([-row["extra_info"]["level"] for row in data_source], np.float64)

        def __len__(self):
            return len(self.score)

        def __iter__(self):
            while True:
                yield from np.argsort(-self.score, kind="stable")[: self.size]

        def update(self, batch: DataProto) -> None:
            scores = batch.batch["token_level_scores"].sum(-1)
            names = batch.non_tensor_batch["data_source"], batch.non_tensor_batch["index"]
            places = [self.offset[name] + i for name, i in zip(*names, strict=True)]
            for place in set(places):
                own = [float(s) for p, s in zip(places, scores, strict=True) if p == place]
                self.score[place] = sum(own) / len(own) - 2

"""

SAVED = """
        def state_dict(self):
            return {"score": self.score, "size": np.int64(self.size), "kept": (1, None, "x")}

        def load_state_dict(self, state):
            assert state["kept"] == [1, None, "x"] and state["size"] == self.size
            self.score = state["score"]
"""

SEEDED = """
    import torch
    from torch.utils.data import RandomSampler
    from verl.experimental.dataset.sampler import AbstractCurriculumSampler

    class Sampler(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config):
            generator = torch.Generator()
            generator.manual_seed(data_config["seed"])
            self.sampler = RandomSampler(data_source=data_source, generator=generator)

        def __iter__(self):
            return iter(self.sampler)

        def __len__(self):
            return len(self.sampler)

        def update(self, batch):
            assert isinstance(batch.batch["advantages"], torch.Tensor)
            assert batch.batch["advantages"].sum(dim=-1).shape == (len(batch),)
"""


@pytest.fixture
def sampler(tmp_path):
    """Writes the file, and gives the config that names it."""

    def write(text: str, *, name: str = "sampler.py", per_step: int = 5) -> Config:
        (tmp_path / name).write_text(dedent(text))
        return make_config(class_path=str(tmp_path / name), class_name="Sampler", per_step=per_step)

    return write


def test_rows_come_in_the_samplers_order_and_the_end_of_a_pass_is_dropped(sampler):
    source = open_source(sampler(IN_ORDER), make_tasks(6))
    steps = [advance(source, step) for step in range(3)]
    names = [f"{name}:{i}" for name in ("low", "high") for i in range(6)]
    assert steps == [names[:5], names[5:10], names[:5]]


def test_a_curriculum_of_verls_runs_as_it_is(sampler):
    """Worked by hand: rows begin with minus their level, so the low ones come first, in order. The score of a row is
    then its mean reward - 2: of the first 5 low ones 3, 1, 0, 4 and 2 of 4 pass."""
    source = open_source(sampler(EASIEST_FIRST + SAVED), make_tasks(6))
    first = source.next(0, 0)
    assert [t.task_id for t in first] == [f"low:{i}" for i in range(5)]
    passes = [3, 1, 0, 4, 2]
    groups = [group(task, n) for task, n in zip(first, passes, strict=True)]
    assert source.observe(0, groups, np.zeros((5, 4))) == {}
    # low:5 has -1, low:3 has -1, then -1.25, -1.5, -1.75; low:2 has -2, as the high ones do
    assert [t.task_id for t in source.next(1, 0)] == ["low:3", "low:5", "low:0", "low:4", "low:1"]
    assert "omegaconf" not in sys.modules


def test_what_the_sampler_is_told(sampler):
    text = EASIEST_FIRST + "            self.told = batch\n"
    source = open_source(
        sampler(text.replace("\n\n            self", "\n            self"), per_step=2),
        make_tasks(2),
    )
    tasks = source.next(0, 0)
    groups = [group(tasks[0], 1, samples=2), group(tasks[1], 2, samples=2)]
    source.observe(0, groups, np.array([[0.5, -0.5], [0.0, 0.25]]))
    batch = source.curriculum._sampler.told  # type: ignore[attr-defined]
    assert len(batch) == 4
    tensors = {name: np.asarray(values).tolist() for name, values in batch.batch.items()}
    assert tensors["responses"] == [[2, 3]] * 4
    assert tensors["response_mask"] == [[1, 1]] * 4
    assert tensors["token_level_scores"] == [[0, 1], [0, 0], [0, 1], [0, 1]]
    assert tensors["token_level_rewards"] == tensors["token_level_scores"]
    assert tensors["advantages"] == [[0.5, 0.5], [-0.5, -0.5], [0, 0], [0.25, 0.25]]
    assert batch.non_tensor_batch["uid"].tolist() == ["0:0", "0:0", "0:1", "0:1"]
    assert batch.non_tensor_batch["index"].tolist() == [0, 0, 1, 1]
    assert batch.non_tensor_batch["acc"].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert batch.non_tensor_batch["reward_model"][3]["ground_truth"] == "1"
    assert batch.meta_info == {"global_steps": 1}


def test_a_sampler_of_torchs_gets_tensors(sampler):
    pytest.importorskip("torch")
    config = sampler(SEEDED, name="seeded.py")
    source = open_source(config, make_tasks(6))
    passed = advance(source, 0) + advance(source, 1)
    assert len(set(passed)) == 10
    assert_resumes_exactly(config, make_tasks(6), steps=5)


@pytest.mark.parametrize("text", [IN_ORDER, EASIEST_FIRST + SAVED])
def test_a_resumed_run_goes_on_exactly(sampler, text):
    assert_resumes_exactly(sampler(text), make_tasks(), steps=8)


@pytest.mark.parametrize("text", [IN_ORDER, EASIEST_FIRST + SAVED])
def test_an_interruption_takes_nothing(sampler, text):
    assert_interruption_takes_nothing(sampler(text), make_tasks())


def test_what_is_not_saved_is_told(sampler, caplog):
    open_source(sampler(EASIEST_FIRST), make_tasks())
    assert "what Sampler learns from update() is not in checkpoints" in caplog.text
    caplog.clear()
    open_source(sampler(EASIEST_FIRST + SAVED, name="other.py"), make_tasks())
    open_source(sampler(IN_ORDER, name="third.py"), make_tasks())
    assert not caplog.records


MORE = """
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "class_name: .* has no class 'Sampler'; name one that is in it"),
        ("import nothing_here", "could not be loaded: No module named 'nothing_here'"),
        (IN_ORDER.replace("len(data", "len(no"), r"__init__\(.*\) of Sampler failed: NameError"),
        (IN_ORDER.replace("iter(self.rows)", "[3]"), r"__iter__\(\) of Sampler failed: TypeError"),
        (IN_ORDER.replace("self.rows)", "self.rows[:3])"), "gave 3 rows in a pass, fewer than"),
        (IN_ORDER.replace("self.rows)", "'abcde')"), "gave row 'a', but rows are numbered from 0"),
        (IN_ORDER.replace("list(range(", "list(range(20, 20 + "), "gave row 24, but rows are numb"),
        (IN_ORDER + MORE.replace("{}", "{1: self}"), "cannot be saved: Object of type Sampler"),
        (
            IN_ORDER + "\n        def update(self, batch):\n            1 / 0\n",
            "update.* ZeroDivis",
        ),
    ],
)
def test_faults_of_a_sampler_are_told(sampler, text, message):
    def run() -> None:
        source = open_source(sampler(text), make_tasks())
        for step in range(2):
            advance(source, step)

    with pytest.raises(ValueError, match=message):
        run()


def test_a_module_is_named_with_pkg(sampler, tmp_path, monkeypatch):
    sampler(IN_ORDER, name="module_of_samplers.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(class_path="pkg://module_of_samplers", class_name="Sampler")
    assert advance(open_source(config, make_tasks()), 0) == [f"low:{i}" for i in range(5)]
    for path, message in (
        ("pkg://nothing_of_the_kind", "cannot import nothing_of_the_kind"),
        ("nothing.py", "nothing.py: no such file"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(make_config(class_path=path, class_name="Sampler"), make_tasks())


def test_another_sampler_cannot_go_on(sampler):
    state = saved(open_source(sampler(IN_ORDER), make_tasks()))
    config = sampler(
        IN_ORDER.replace("Sampler(", "Other(", 1).replace("AbstractOther(", "AbstractSampler("),
        name="o.py",
    )
    config = make_config(class_path=config.curriculum.class_path, class_name="Other")
    with pytest.raises(
        ValueError, match="saved with the sampler Sampler, and curriculum.class_name"
    ):
        open_source(config, make_tasks()).restore(state)


def test_verls_options_name_it():
    done = translate({"data.sampler.class_path": "pkg://a.b", "data.sampler.class_name": "C"})
    assert done.settings["curriculum.class_path"] == "pkg://a.b"
    assert done.settings["curriculum.class_name"] == "C"
    assert (done.problems, done.unused) == ({}, [])
    assert "curriculum.class_path" not in translate({"data.sampler.class_path": None}).settings


def test_a_trainer_with_a_sampler_needs_no_torch(sampler):
    config = sampler(EASIEST_FIRST + SAVED)
    here = Path(__file__).parent
    code = f"""
import sys
sys.path.insert(0, {str(here)!r})
from curriculum_cases import advance, make_config, make_tasks
from tooljax.curriculum.source import open_source
config = make_config(class_path={config.curriculum.class_path!r}, class_name="Sampler")
source = open_source(config, make_tasks())
advance(source, 0), advance(source, 1)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
