"""docs/README.md leads to every page, and its links lead somewhere."""

import re

from docs_pages import DOCS, read, wrong_names


def test_every_page_is_in_the_index():
    linked = set(re.findall(r"\]\((\w+\.md)\)", read("README.md")))
    pages = {file.name for file in DOCS.glob("*.md")} - {"README.md"}
    assert len(pages) >= 13
    assert sorted(pages - linked) == [], "docs/README.md lacks a line for these pages"


def test_links_lead_somewhere():
    for page in ("README.md", "metrics.md"):
        assert list(wrong_names(read(page))) == [], page


def test_names_on_the_page_of_settings_are_settings():
    assert list(wrong_names(read("config.md"))) == []
