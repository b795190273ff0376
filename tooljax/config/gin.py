"""Reads and writes configs in gin's syntax, onto the typed tree of `tooljax.config.schema`.

    include 'base.gin'              # relative to this file; applied here, so later lines win
    grpo.kl_coef = 0.01             # section.field = Python literal
    data.train = (                  # brackets may span lines
        'data/train.parquet',
    )

Files and folders that a setting names are looked for beside the .gin file first, then from the working folder.

Our files are valid gin, but this is not the gin-config library: a config holds values only, so macros, scopes,
@references and imports are errors. Precedence: default < files, in order, with includes in place < --set.
"""

import dataclasses
import difflib
import io
import keyword
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from tooljax.config.checks import check, reason
from tooljax.config.errors import ConfigError
from tooljax.config.schema import Config
from tooljax.config.values import WrongValue, convert, describe, literal, takes_text

SECTIONS: dict[str, dict[str, Any]] = {
    section.name.rstrip("_"): get_type_hints(section.type, include_extras=True)
    for section in dataclasses.fields(Config)
}
"""Type of every field, by section and name."""


PATHS = frozenset(
    {
        *("model.path", "data.train", "data.eval", "sidecar.token_file", "sidecar.ca_file"),
        *("sidecar.tool_config", "sidecar.interaction_config", "reward.function"),
        *("sft.demonstrations", "lora.adapter"),
    }
)
"""Fields that name what must be there already."""


class Binding(NamedTuple):
    """`target = text`, set at `where`. `bare` text needs no quotes: it came from the command line."""

    target: str
    text: str
    where: str
    bare: bool = False
    folder: Path = Path()
    """Of the file that says so."""


def load_config(files: Sequence[str | Path], bindings: Sequence[str] = ()) -> Config:
    """The config that the .gin files and then the bindings (`section.field=value`) give.

    Raises ConfigError, with one line for each problem: where, what value, what was expected.
    """
    found = [binding for file in files for binding in _read_file(Path(file), where="", parents=())]
    found += [_command_line_binding(text) for text in bindings]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems = []
    for binding in found:
        try:
            values[binding.target] = _value(binding)
            origins[binding.target] = binding.where
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    config = _build(values)
    check(config, origins)
    return config


def section_of(config: Config, name: str) -> Any:
    """A section by the name that it has in configs."""
    return getattr(config, _attribute(name))


def with_section(config: Config, name: str, section: Any) -> Config:
    """The config with another section of that name."""
    return dataclasses.replace(config, **{_attribute(name): section})


def _attribute(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) else name


def to_gin(config: Config) -> str:
    """Every field of the config as gin bindings; `load_config` reads them back to an equal config."""
    blocks = []
    for section, fields in SECTIONS.items():
        values = section_of(config, section)
        blocks.append("".join(f"{section}.{name} = {getattr(values, name)!r}\n" for name in fields))
    return "\n".join(blocks)


# --- files: text to bindings ------------------------------------------------------------------------------------


def _read_file(path: Path, *, where: str, parents: tuple[Path, ...]) -> Iterator[Binding]:
    """The bindings of a file and of what it includes, in the order in which they apply."""
    resolved = path.resolve()
    if resolved in parents:
        chain = " -> ".join(str(p.name) for p in (*parents[parents.index(resolved) :], resolved))
        raise ConfigError(f"{where}files include each other in a circle: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{where}config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}cannot read config file {path}: {error}") from None
    for line, tokens in _statements(text, path):
        here = f"{path}:{line}"
        if tokens[0].string == "include":
            included = path.parent / _included(tokens, here)
            yield from _read_file(included, where=f"{here}: ", parents=(*parents, resolved))
        else:
            yield _file_binding(tokens, text, here)._replace(folder=path.parent)


def _statements(text: str, path: Path) -> Iterator[tuple[int, list[tokenize.TokenInfo]]]:
    """(line number, tokens) of each logical line, without comments. Python's own rules: brackets join lines."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    current: list[tokenize.TokenInfo] = []
    line = 1
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                if current:
                    yield current[0].start[0], current
                current = []
            elif token.type not in skipped:
                current.append(token)
            line = token.end[0]
    except (tokenize.TokenError, SyntaxError) as error:
        line = current[0].start[0] if current else line
        raise ConfigError(
            f"{path}:{line}: cannot read this statement ({error.args[0]}); is a bracket or quote left open?"
        ) from None


def _included(tokens: list[tokenize.TokenInfo], here: str) -> str:
    if len(tokens) != 2 or tokens[1].type != tokenize.STRING:
        raise ConfigError(f"{here}: include takes one quoted path: include 'base.gin'")
    try:
        return str(literal(tokens[1].string))
    except WrongValue as error:
        raise ConfigError(f"{here}: include takes one quoted path, got {error}") from None


def _file_binding(tokens: list[tokenize.TokenInfo], text: str, here: str) -> Binding:
    """One `section.field = literal` statement; names the parts of gin that we do not have."""
    words = [token.string for token in tokens]
    if words[0] in ("import", "from"):
        raise ConfigError(
            f"{here}: gin's import is not supported: a config only sets values, so there is nothing to "
            "register; delete the line"
        )
    equals = words.index("=") if "=" in words else len(words)
    target, value = "".join(words[:equals]), tokens[equals + 1 :]
    if "/" in target:
        raise ConfigError(
            f"{here}: gin's scopes are not supported ({target}): there is one value for each field; "
            f"write {target.rpartition('/')[2]} = ..., or a second .gin file"
        )
    if "@" in words or "%" in words:
        raise ConfigError(
            f"{here}: gin's @references and %macros are not supported: write the value itself, as a literal"
        )
    if not value:
        raise ConfigError(f"{here}: not a binding: {' '.join(words)}; write section.field = value")
    return Binding(target, _source(text, value[0].start, value[-1].end), here)


def _source(text: str, start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text between two (line, column) positions."""
    lines = io.StringIO(text).readlines()[start[0] - 1 : end[0]]
    lines[-1] = lines[-1][: end[1]]
    lines[0] = lines[0][start[1] :]
    return "".join(lines)


def _command_line_binding(text: str) -> Binding:
    target, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: not a binding; write --set section.field=value")
    return Binding(target.strip(), value.strip(), f"--set {text}", bare=True)


# --- bindings to values -----------------------------------------------------------------------------------------


def _value(binding: Binding) -> Any:
    """The checked value of a binding. Raises ConfigError: unknown field, wrong type, out of range."""
    section, _, name = binding.target.partition(".")
    if name not in SECTIONS.get(section, {}):
        raise ConfigError(f"{binding.where}: {_unknown(binding.target)}")
    hint = SECTIONS[section][name]
    try:
        value = _bare_text(binding.text, hint) if binding.bare else literal(binding.text)
        because = reason(binding.target, value)
        if because:
            raise ConfigError(f"{binding.where}: {because}")
        value = convert(value, hint)
        return _beside(value, binding.folder) if binding.target in PATHS else value
    except WrongValue as error:
        choice = _closest(binding.text.strip("'\""), _choices(hint))
        raise ConfigError(
            f"{binding.where}: {binding.target} takes {describe(hint)}, got {error}"
            + (f". Did you mean {choice!r}?" if choice else "")
        ) from None


def _beside(value: Any, folder: Path) -> Any:
    """The path, or paths, with the folder in front where that leads to something; reward.function's up to its colon."""
    if not isinstance(value, str):
        return tuple(_beside(part, folder) for part in value)
    path, colon, function = value.rpartition(":")
    if not path.endswith(".py"):
        path, colon, function = value, "", ""
    if not path or Path(path).is_absolute() or folder.resolve() == Path.cwd():
        return value
    return f"{folder / path}{colon}{function}" if (folder / path).exists() else value


def _bare_text(text: str, hint: Any) -> Any:
    """A value from the command line: quotes may be left out where the field holds text."""
    try:
        value = literal(text)
    except WrongValue:
        return text
    return text if takes_text(hint) and not isinstance(value, str) else value


def _unknown(target: str) -> str:
    """Says what is wrong with a name, and which field was probably meant."""
    section, dot, name = target.partition(".")
    homes = [f"{home}.{section}" for home, fields in SECTIONS.items() if section in fields]
    if not dot:
        meant = f" Did you mean {' or '.join(homes)}?" if homes else ""
        return (
            f"{target!r} has no section: every field is section.field, and gin's macros are not supported."
            + meant
        )
    everything = [f"{home}.{field}" for home, fields in SECTIONS.items() for field in fields]
    if section in SECTIONS:
        same_name = [path for path in everything if path.endswith(f".{name}")]
        near = _closest(name, SECTIONS[section])
        meant = f"{section}.{near}" if near else next(iter(same_name), None) or _moved(name)
        what, known = f"section {section!r} has no field {name!r}", SECTIONS[section]
    else:
        near = _closest(section, SECTIONS)
        guess = f"{near}.{name}" if near else target
        meant = _closest(guess, everything) or (f"section {near}" if near else None)
        what, known = f"there is no section {section!r}", SECTIONS
    return f"{what} ({target}). " + (
        f"Did you mean {meant}?" if meant else f"There are: {', '.join(known)}."
    )


def _moved(name: str) -> str | None:
    """The field of another section whose section and name together make this name: valid_call_reward, data_seed."""
    spelled = {
        words: f"{home}.{field}"
        for home, fields in SECTIONS.items()
        for field in fields
        for words in (f"{home}_{field}", f"{field}_{home}")
    }
    if name in SECTIONS:
        return f"section {name}"
    near = difflib.get_close_matches(name, list(spelled), n=1, cutoff=0.75)
    return spelled[near[0]] if near else None


def _choices(hint: Any) -> list[str]:
    return [choice for choice in getattr(hint, "__args__", ()) if isinstance(choice, str)]


def _closest(word: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def _build(values: dict[str, Any]) -> Config:
    """The tree with these values, and the schema's defaults elsewhere."""
    config = Config()
    for section in SECTIONS:
        own = {
            name: values[f"{section}.{name}"]
            for name in SECTIONS[section]
            if f"{section}.{name}" in values
        }
        config = with_section(
            config, section, dataclasses.replace(section_of(config, section), **own)
        )
    return config
