"""Configs from the user's side: written back, shipped, documented, and given on the command line."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tooljax.config import Config, ConfigError, load_config, parse_args, to_gin
from tooljax.config.cli import field_documents
from tooljax.config.gin import SECTIONS, _build, section_of
from tooljax.config.types import Range
from tooljax.config.values import WrongValue, convert, describe

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


# --- writing it back --------------------------------------------------------------------------------------------


def _values(hint: Any) -> st.SearchStrategy:
    """Every value that a field of this type may hold."""
    if get_origin(hint) is Annotated:
        return _values(get_args(hint)[0]).filter(lambda value: _takes(value, hint))
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(_values(get_args(hint)[0]), max_size=3).map(tuple)
    simple = {
        str: st.text(st.characters(exclude_categories=["Cs"])),
        bool: st.booleans(),
        int: st.integers(-3, 3) | st.integers(0, 2**60),
        float: st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False),
    }
    return simple[hint]


def _takes(value: Any, hint: Any) -> bool:
    try:
        convert(value, hint)
    except WrongValue:
        return False
    return True


# Fields that must agree with others keep their defaults: random ones would contradict each other.
TIED = re.compile(
    r"async\.|lora\.|profile\.|curriculum\.|grpo\.|sampling\.|limits\.max_\w+_tokens|sidecar\.max_model_tokens|batch\.row_|evaluate\.every|guard\.\w+_entropy|mesh\.|optimizer\.rounding|reward\.(function_kwargs|overlong)"
)


@settings(max_examples=30)
@given(data=st.data())
def test_to_gin_reads_back_equal(data, tmp_path_factory):
    strategies = {
        f"{section}.{name}": _values(hint)
        for section, fields in SECTIONS.items()
        for name, hint in fields.items()
        if not TIED.match(f"{section}.{name}")
    }
    config = _build(data.draw(st.fixed_dictionaries({}, optional=strategies)))
    path = tmp_path_factory.mktemp("config") / "config.gin"
    path.write_text(to_gin(config), encoding="utf-8", newline="")
    assert load_config([path]) == config


def test_to_gin_reads_back_the_fields_that_must_agree(write):
    config = load_config(
        [],
        [
            "limits.max_trajectory_tokens=96",
            "limits.max_prompt_tokens=33",
            "batch.row_lengths=(48, 96)",
            "sampling.temperature=0.7",
            "evaluate.every_steps=2",
            "data.eval=('a.parquet',)",
        ],
    )
    assert load_config([write(to_gin(config))]) == config


def test_to_gin_has_every_field_once():
    names = re.findall(r"(?m)^(\S+) = ", to_gin(Config()))
    assert names == [
        f"{section}.{field}" for section, fields in SECTIONS.items() for field in fields
    ]


def test_our_files_are_valid_gin():
    """gin's own parser, where it is installed, reads what we write and what we ship."""
    parser = pytest.importorskip("gin.config_parser", reason="pip install gin-config")

    class Delegate(parser.ParserDelegate):
        def configurable_reference(self, scoped_configurable_name, evaluate):
            raise AssertionError("we have no references")

        def macro(self, scoped_name):
            raise AssertionError("we have no macros")

    for text in [to_gin(Config()), *(path.read_text() for path in SHIPPED)]:
        statements = list(parser.ConfigParser(text, Delegate()))
        assert statements


# --- the shipped files ------------------------------------------------------------------------------------------


def test_there_are_shipped_configs():
    assert {"quickstart.gin", "gsm8k_smollm2_cpu.gin"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=[str(path.relative_to(CONFIGS)) for path in SHIPPED])
def test_every_shipped_config_loads(path):
    config = load_config([path])
    assert config != Config()


# --- the schema, and the command line ---------------------------------------------------------------------------


def test_every_field_and_section_is_documented():
    for section, fields in SECTIONS.items():
        assert list(field_documents()[section]) == list(fields)
        assert type(section_of(Config(), section)).__doc__


def test_every_default_is_a_value_that_its_field_takes():
    for section, fields in SECTIONS.items():
        for name, hint in fields.items():
            default = getattr(section_of(Config(), section), name)
            assert convert(default, hint) == default, f"{section}.{name}"
            assert type(convert(default, hint)) is type(default), f"{section}.{name}"


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int, "int"),
        (Annotated[int, Range(low=1)], "int >= 1"),
        (Annotated[float, Range(above=0, high=1)], "float > 0 and <= 1"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (tuple[str, ...], "tuple of str"),
    ],
)
def test_types_are_described_in_words(hint, text):
    assert describe(hint) == text


@pytest.mark.parametrize(
    ("value", "fits"), [(0.0, False), (1e-9, True), (1.0, True), (1.0001, False)]
)
def test_range_ends_are_in_or_out_as_the_range_says(value, fits):
    hint = Annotated[float, Range(above=0, high=1)]
    if fits:
        assert convert(value, hint) == value
    else:
        with pytest.raises(WrongValue, match=re.escape(repr(value))):
            convert(value, hint)


@pytest.mark.parametrize(
    ("file_option", "set_option"), [("--config", "--set"), ("--gin_file", "--gin_param")]
)
def test_both_names_of_each_option(write, file_option, set_option):
    first, second = write("run.steps = 2\n", "a.gin"), write("run.seed = 3\n", "b.gin")
    arguments = [file_option, first, f"{file_option}={second}", set_option, "grpo.kl_coef=0.5"]
    config = parse_args(arguments, prog="train", description="")
    assert (config.run.steps, config.run.seed, config.grpo.kl_coef) == (2, 3, 0.5)


def test_help_lists_every_field_with_type_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--help"], prog="train", description="Trains.")
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for section, fields in SECTIONS.items():
        for name in fields:
            assert f"{section}.{name}: " in text
    assert (
        "    grpo.group_size: int >= 2, default 8\n"
        "        Trajectories of one prompt. Advantages are relative within the group" in text
    )


def test_dry_run_prints_the_resolved_config_and_exits(write, capsys):
    name = write("grpo.kl_coef = 0.25\n")
    arguments = ["--config", name, "--set", "run.steps=9", "--dry_run"]
    with pytest.raises(SystemExit) as exit_:
        parse_args(arguments, prog="train", description="")
    assert exit_.value.code == 0
    assert load_config([write(capsys.readouterr().out, "resolved.gin")]) == load_config(
        [name], ["run.steps=9"]
    )


def test_a_wrong_setting_is_printed_without_a_traceback(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--set", "grpo.group_size=1"], prog="train", description="")
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        "train: --set grpo.group_size=1: group_size=1 gives every advantage 0; "
        "GRPO needs group_size >= 2 (set grpo.group_size)\n"
    )


def test_options_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--conf", "x.gin"], prog="train", description="")
    assert "unrecognized arguments: --conf" in capsys.readouterr().err
