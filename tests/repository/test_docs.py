"""The documents' lengths, links and paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for pattern in ("*.md", "cuda/*.md", "datasets/*.md", "docs/**/*.md") for path in ROOT.glob(pattern)
)
MOST_ROWS = {"README.md": 130, "docs/architecture.md": 250, "docs/glossary.md": 30}
MOST_ROWS_OF_A_TOPIC = 250

# Where the paths in a page's text may begin, beside the page's own folder.
BASES = ("", "mlpgpu", "mlpgpu/backends", "mlpgpu/backends/cuda", "cuda", "examples")
PATH = re.compile(r"[\w./-]+(\.(py|cuh|h|cpp|c|md|jsonl?|png|cfg|toml|sh)|/)")
MADE = ("runs/", ".venv/")  # folders that commands make


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_are_there(page: Path) -> None:
    for code in re.findall(r"`([^`\n]+)`", text_of(page)):
        for word in code.split():
            if PATH.fullmatch(word) and not word.startswith(MADE):
                assert any((base / word).exists() for base in (page.parent, *map(ROOT.joinpath, BASES))), word


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_short(page: Path) -> None:
    name = name_of(page)
    most = MOST_ROWS_OF_A_TOPIC if name.startswith("docs/experiments/") else MOST_ROWS.get(name)
    assert most is None or page.read_text(encoding="utf-8").count("\n") <= most
