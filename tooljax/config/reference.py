"""Every config field as a page of Markdown: `python -m tooljax.config.reference > docs/config.md`.

The page says what `--help` says: types, defaults and the docstrings of the schema. It is never edited by hand.
"""

import inspect

from tooljax.config.cli import field_documents
from tooljax.config.gin import SECTIONS, section_of
from tooljax.config.schema import Config
from tooljax.config.values import describe

COMMAND = "python -m tooljax.config.reference > docs/config.md"

_HEAD = f"""\
# Every setting

Made from the schema by `{COMMAND}`; edit the docstrings in `tooljax/config/`, not this page.

A config is a gin file of lines such as `grpo.group_size = 16`, given with `--config FILE`; `--set section.field=value`
wins over files, and both may be repeated. `--help` prints what is below, `--dry_run` the resolved config. Values are
Python literals; text needs no quotes in `--set`. A wrong name, type or range is one error with file and line, as are
settings that contradict each other.

Sections: {{sections}}."""


def reference() -> str:
    """The page: a table for each section, with a row of name, type, default and meaning for each field."""
    documents, defaults = field_documents(), Config()
    listed = ", ".join(f"[{section}](#{section})" for section in SECTIONS)
    parts = [_HEAD.format(sections=listed)]
    for section, fields in SECTIONS.items():
        values = section_of(defaults, section)
        parts.append(f"\n## {section}\n\n{_joined(inspect.getdoc(values) or '')}\n")
        parts.append("| field | type | default | meaning |\n|---|---|---|---|")
        for name, hint in fields.items():
            cells = (
                f"`{section}.{name}`",
                _cell(describe(hint)),
                _cell(f"`{getattr(values, name)!r}`"),
                _cell(documents[section][name]),
            )
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def _joined(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """Text that a Markdown table takes as one cell, and shows as it is: a < would begin an HTML tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(reference(), end="")
