"""The config reader: what is accepted, which sentence each mistake gets, and that nothing is lost on the way."""

import dataclasses
import re
from pathlib import Path

import pytest

from tooljax.config import Config, ConfigError, load_config
from tooljax.config.checks import check

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.gin"))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a .gin file into the working folder, so that messages show its bare name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.gin") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return write


def refusal(files=(), bindings=()) -> str:
    """The text of the ConfigError that these settings get."""
    with pytest.raises(ConfigError) as caught:
        load_config(files, bindings)
    return str(caught.value)


# --- what is read -----------------------------------------------------------------------------------------------


def test_nothing_set_gives_the_defaults():
    assert load_config([]) == Config()


def test_values_comments_and_brackets_over_lines(write):
    name = write(
        "# a comment with an apostrophe: it's fine\n"
        "grpo.kl_coef = 0.01  # and one behind\n"
        "data.train = (\n"
        "    'a.parquet',  # inside the bracket\n"
        "    'b#c.parquet',\n"
        ")\n"
        "\n"
        "  model.remat='none'\n"
        "batch.row_lengths = [512, 4096]\n"
        "run.dir = 'runs/' 'x'\n"
    )
    config = load_config([name])
    assert config.grpo.kl_coef == 0.01
    assert config.data.train == ("a.parquet", "b#c.parquet")
    assert config.model.remat == "none"
    assert config.batch.row_lengths == (512, 4096)
    assert config.run.dir == "runs/x"
    assert config.grpo.group_size == Config().grpo.group_size


def test_an_int_for_a_float_field_becomes_a_float():
    value = load_config([], ["grpo.kl_coef=1"]).grpo.kl_coef
    assert (value, type(value)) == (1.0, float)


def test_later_files_win_and_set_wins_over_files(write):
    first = write("run.steps = 1\nrun.seed = 1\ngrpo.group_size = 3\n", "first.gin")
    second = write("run.steps = 2\nrun.seed = 2\n", "second.gin")
    config = load_config([first, second], ["run.steps=3", "run.steps=4"])
    assert (config.grpo.group_size, config.run.seed, config.run.steps) == (3, 2, 4)


def test_an_include_applies_where_it_stands_relative_to_its_file(write):
    write("run.steps = 1\nrun.seed = 1\n", "shared/base.gin")
    write("include '../shared/base.gin'\n", "more/middle.gin")
    name = write("run.seed = 7\ninclude 'more/middle.gin'\nrun.steps = 7\n")
    config = load_config([name])
    # base.gin comes after the first line and before the last.
    assert (config.run.seed, config.run.steps) == (1, 7)


def test_the_same_file_may_be_included_twice(write):
    write("run.steps = 1\n", "base.gin")
    write("include 'base.gin'\nrun.steps = 2\n", "left.gin")
    name = write("include 'left.gin'\ninclude 'base.gin'\n")
    assert load_config([name]).run.steps == 1


@pytest.mark.parametrize(
    ("binding", "section", "field", "value"),
    [
        ("model.path=runs/x", "model", "path", "runs/x"),
        ("model.path='runs/x'", "model", "path", "runs/x"),
        ("model.path=12", "model", "path", "12"),
        ("model.path=a=b", "model", "path", "a=b"),
        ("model.path=", "model", "path", ""),
        ("run.progress=off", "run", "progress", "off"),
        (" grpo.scale_by_std = False ", "grpo", "scale_by_std", False),
        ("data.train=('a','b')", "data", "train", ("a", "b")),
        ("optimizer.learning_rate=1e-4", "optimizer", "learning_rate", 1e-4),
    ],
)
def test_bindings_on_the_command_line(binding, section, field, value):
    assert getattr(getattr(load_config([], [binding]), section), field) == value


# --- what is refused, and how -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "grpo.kl_coeff = 1",
            "has no field 'kl_coeff' (grpo.kl_coeff). Did you mean grpo.kl_coef?",
        ),
        (
            "grop.kl_coef = 1",
            "there is no section 'grop' (grop.kl_coef). Did you mean grpo.kl_coef?",
        ),
        (
            "run.kl_coef = 1",
            "section 'run' has no field 'kl_coef' (run.kl_coef). Did you mean grpo.kl_coef?",
        ),
        ("run.zzz = 1", "section 'run' has no field 'zzz' (run.zzz). There are: dir, seed, steps"),
        ("a.b.c = 1", "there is no section 'a' (a.b.c). There are: run, model"),
        (
            "steps = 100",
            "'steps' has no section: every field is section.field, and gin's macros are not",
        ),
        ("steps = 100", "Did you mean run.steps or sft.steps or profile.steps?"),
        (
            "grpo.kl_coef = '0.01'",
            "grpo.kl_coef takes float >= 0, got '0.01' (str); write it without quotes",
        ),
        ("grpo.kl_coef = -0.5", "grpo.kl_coef takes float >= 0, got -0.5 (float)"),
        ("grpo.kl_coef = 1e999", "grpo.kl_coef takes float >= 0, got inf, which is not finite"),
        ("grpo.kl_coef = True", "grpo.kl_coef takes float >= 0, got True (bool)"),
        ("grpo.kl_coef = None", "grpo.kl_coef takes float >= 0, got None"),
        ("grpo.clip_low = 1", "grpo.clip_low takes float >= 0 and < 1, got 1.0 (float)"),
        ("grpo.group_size = 8.5", "grpo.group_size takes int >= 2, got 8.5 (float)"),
        ("grpo.group_size = 8.0", "grpo.group_size takes int >= 2, got 8.0 (float); write 8"),
        ("grpo.group_size = 0", "grpo.group_size takes int >= 2, got 0 (int)"),
        (
            "grpo.group_size = 1",
            "group_size=1 gives every advantage 0; GRPO needs group_size >= 2 (set grpo.group_size)",
        ),
        ("run.steps = True", "run.steps takes int >= 1, got True (bool)"),
        ("run.steps = '5'", "run.steps takes int >= 1, got '5' (str); write it without quotes"),
        ("data.shuffle = 1", "data.shuffle takes bool, got 1 (int); write True or False"),
        ("model.path = 3", "model.path takes str, got 3 (int)"),
        ("model.path = x", "model.path takes str, got 'x', which is not a Python literal"),
        (
            "run.steps = 3 + 4",
            "run.steps takes int >= 1, got '3 + 4', which is not a Python literal",
        ),
        (
            "run.progress = 'liv'",
            "run.progress takes one of 'live', 'plain', 'off', got 'liv' (str). Did you mean 'live'?",
        ),
        (
            "run.progress = ['live']",
            "run.progress takes one of 'live', 'plain', 'off', got ['live'] (list)",
        ),
        (
            "data.train = 'a'",
            "data.train takes tuple of str, got 'a' (str); write ('a',) for a single one",
        ),
        ("data.train = ('a')", "write ('a',) for a single one"),
        ("data.train = ('a', 2)", "takes tuple of str, got ('a', 2), whose element 1 is 2 (int)"),
        ("batch.row_lengths = (1, True)", "whose element 1 is True (bool)"),
        (
            "batch.row_lengths = 4096",
            "takes tuple of int, got 4096 (int); write (4096,) for a single one",
        ),
        ("import tooljax", "gin's import is not supported: a config only sets values"),
        ("train/run.steps = 1", "gin's scopes are not supported (train/run.steps)"),
        ("train/run.steps = 1", "write run.steps = ..., or a second .gin file"),
        (
            "run.steps = %STEPS",
            "gin's @references and %macros are not supported: write the value itself",
        ),
        (
            "run.steps = @steps()",
            "gin's @references and %macros are not supported: write the value itself",
        ),
        ("run.steps", "not a binding: run . steps; write section.field = value"),
        ("run.steps =", "not a binding: run . steps =; write section.field = value"),
        ("include base", "include takes one quoted path: include 'base.gin'"),
        ("include 'no.gin'", "config file no.gin does not exist"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(write, line, sentence):
    message = refusal([write(f"# first line\n{line}\n")])
    assert message.startswith("run.gin:2: ")
    assert sentence in message


@pytest.mark.parametrize(
    ("binding", "sentence"),
    [
        (
            "grpo.group_size=1",
            "group_size=1 gives every advantage 0; GRPO needs group_size >= 2 (set grpo.",
        ),
        ("run.steps=abc", "run.steps takes int >= 1, got 'abc' (str)"),
        ("run.steps=1e3", "run.steps takes int >= 1, got 1000.0 (float); write 1000"),
        ("data.shuffle=true", "data.shuffle takes bool, got 'true' (str); write True or False"),
        ("model.dtype=bfloat15", "got 'bfloat15' (str). Did you mean 'bfloat16'?"),
        ("data.train=a.parquet", "got 'a.parquet' (str); write ('a.parquet',) for a single one"),
        ("steps=3", "'steps' has no section"),
        ("grpo.group_sizes=3", "Did you mean grpo.group_size?"),
        ("run.steps", "not a binding; write --set section.field=value"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(binding, sentence):
    message = refusal([], [binding])
    assert message.startswith(f"--set {binding}: ")
    assert sentence in message


def test_all_mistakes_are_reported_at_once(write):
    name = write("run.stepz = 1\nrun.seed = 'a'\n")
    lines = refusal([name], ["model.remat=3"]).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "run.gin:1",
        "run.gin:2",
        "--set model.remat=3",
    ]


@pytest.mark.parametrize(
    "text", ["run.dir = ('a',\n\n", "run.seed = 1\nrun.dir = ('a'\nrun.steps = 2\n"]
)
def test_an_open_bracket_is_reported(write, text):
    message = refusal([write(text)])
    assert re.match(r"run\.gin:\d: ", message)
    assert "is a bracket or quote left open?" in message or "not a Python literal" in message


def test_an_open_quote_is_reported_with_its_line(write):
    assert refusal([write("run.seed = 1\nrun.dir = 'a\n")]).startswith("run.gin:2: ")


def test_an_include_circle_is_an_error_that_shows_it(write):
    write("include 'b.gin'\n", "a.gin")
    write("\ninclude './a.gin'\n", "b.gin")
    assert (
        refusal(["a.gin"])
        == "b.gin:2: files include each other in a circle: a.gin -> b.gin -> a.gin"
    )


def test_a_missing_or_unreadable_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(["none.gin"]) == "config file none.gin does not exist"
    (tmp_path / "folder.gin").mkdir()
    assert refusal(["folder.gin"]).startswith("cannot read config file folder.gin: ")
    (tmp_path / "bytes.gin").write_bytes(b"run.dir = '\xff'\n")
    assert refusal(["bytes.gin"]).startswith("cannot read config file bytes.gin: ")


def test_a_scope_is_not_mistaken_for_a_path_in_a_value(write):
    assert load_config([write("run.dir = 'a/b@c%d'\n")]).run.dir == "a/b@c%d"


# --- checks between settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (
            ["limits.max_prompt_tokens=4096"],
            "limits.max_prompt_tokens=4096 must be below limits.max_trajectory_tokens=4096",
        ),
        (
            ["sidecar.max_model_tokens=2048"],
            "limits.max_trajectory_tokens=4096 is above sidecar.max_model_tokens=2048",
        ),
        (
            ["batch.row_lengths=(512,2048)"],
            "batch.row_lengths=(512, 2048) cannot hold a trajectory of limits.max_trajectory_tokens=4096",
        ),
        (["batch.row_lengths=(4096,4096)"], "must be positive and strictly increasing"),
        (["batch.row_lengths=()"], "must be positive and strictly increasing"),
        (["batch.row_lengths=(0,4096)"], "must be positive and strictly increasing"),
        (["sampling.temperature=0"], "set sampling.temperature above 0"),
        (["sampling.top_p=0.9"], "sampling.top_p=0.9 samples from a truncated support"),
        (["sampling.top_k=20"], "sampling.top_k=20 samples from a truncated support"),
        (["mesh.tensor=0"], "mesh.tensor=0 leaves no device; set it to 1 to split nothing"),
        (["mesh.data=-1"], "mesh.data and mesh.fsdp are all -1, but only one axis can take"),
        (
            ["mesh.fsdp=3"],
            "batch.rows_per_microbatch=8 does not divide over mesh.data=1 x mesh.fsdp=3; set it to a multiple of 3",
        ),
        (
            ["mesh.context=3"],
            "batch.row_lengths has 1024, which does not divide over mesh.context=3",
        ),
        (["evaluate.every_steps=5"], "evaluate.every_steps=5 but data.eval names no file"),
    ],
)
def test_settings_that_contradict_each_other(bindings, sentence):
    message = refusal([], bindings)
    assert sentence in message
    assert message.startswith(f"--set {bindings[0]}: ")
    assert "\n" not in message


def test_a_contradiction_names_every_place_that_set_it(write):
    name = write("limits.max_trajectory_tokens = 1024\nlimits.max_prompt_tokens = 1024\n")
    assert refusal([name]).startswith(
        "run.gin:2, run.gin:1: limits.max_prompt_tokens=1024 must be below"
    )


def test_rows_of_more_than_four_lengths_are_refused():
    many = ["batch.mixed_lengths=True", "batch.row_lengths=(256,512,1024,2048,4096)"]
    sentence = "compiles the update for each of the 5 batch.row_lengths; keep at most 4"
    assert sentence in refusal([], many)
    load_config([], many[1:])


def test_settings_on_the_edge_are_accepted():
    load_config([], ["limits.max_prompt_tokens=4095", "sidecar.max_model_tokens=4096"])
    remote = ["sidecar.max_model_tokens=1", "sidecar.urls=('http://127.0.0.1:1',)"]
    load_config([], remote)  # the limit is the embedded engine's, which is not used
    load_config([], ["evaluate.every_steps=5", "data.eval=('a',)", "evaluate.temperature=0"])


def test_check_holds_for_a_config_that_was_never_a_file():
    config = Config()
    check(config)
    single = dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, group_size=1))
    with pytest.raises(ConfigError, match=r"^group_size=1 gives every advantage 0"):
        check(single)
