"""The site's parts: the reference has every public name, the gallery's scripts run and end in labelled pictures.

``make docs`` builds it, by packages that tests do without.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import runpy
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mlpgpu

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
SCRIPTS = sorted((SITE / "gallery").rglob("*.py"))
# Where public names are.
MODULES = ("mlpgpu", "mlpgpu.datasets", "mlpgpu.errors", "mlpgpu.sklearn", "mlpgpu.tables")
DIRECTIVE = re.compile(r"^\.\. auto(?:class|exception|function):: ([\w.]+)$", re.M)
LEAST_SCRIPTS = 12


def public(module: types.ModuleType) -> dict[str, Any]:
    """What users take from a module, by name; modules and the version stand in words on the reference's first page."""
    if module is mlpgpu.errors:
        names = [name for name, value in vars(module).items() if is_error(value)]
    else:
        names = list(module.__all__)
    values = {f"{module.__name__}.{name}": getattr(module, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, type | types.FunctionType)}


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, mlpgpu.MlpgpuError)


def missing(reference: str) -> list[str]:
    """Public names that a reference of this text lacks; one that stands under another name of its own is there."""
    documented = set()
    for name in DIRECTIVE.findall(reference):
        module, _, last = name.rpartition(".")
        documented.add(getattr(importlib.import_module(module), last))
    values = {name: value for module in MODULES for name, value in public(importlib.import_module(module)).items()}
    return [name for name, value in values.items() if value not in documented]


@functools.cache
def reference() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((SITE / "reference").glob("*.md")))


def test_reference_has_every_public_name() -> None:
    assert missing(reference()) == []


@pytest.mark.parametrize("name", ["mlpgpu.Trainer", "mlpgpu.datasets.read_idx", "mlpgpu.errors.StorageError"])
def test_a_missing_name_is_found(name: str) -> None:
    assert missing(re.sub(rf"^\.\. auto\w+:: {re.escape(name)}$", "", reference(), flags=re.M)) == [name]


def test_site_has_every_document() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in SITE.glob("*.md"))
    trees = "\n".join(re.findall(r"^```\{toctree\}\n(.*?)^```$", pages, re.M | re.S)).split("\n")
    documents = [path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert [path for path in documents if not path.startswith("docs/site/") and path not in trees] == []


def test_gallery_is_large_enough() -> None:
    assert len(SCRIPTS) >= LEAST_SCRIPTS
    assert all(path.name.startswith("plot_") for path in SCRIPTS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_has_a_title_and_says_what_is_seen(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    title, underline, *_ = (ast.get_docstring(ast.parse(source)) or "\n").split("\n")
    assert title and underline == "=" * len(title)
    _, _, said = source.rpartition("plt.show()\n\n# %%\n")
    assert said != source and all(row.startswith("# ") for row in said.splitlines())


@pytest.fixture
def pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """matplotlib without a screen, in an empty folder; its figures are closed afterwards."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("MLPGPU_BACKEND", "cpu")
    monkeypatch.chdir(tmp_path)
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: None)
    yield plt
    plt.close("all")


@pytest.mark.thorough
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs_and_labels_its_axes(path: Path, pyplot: Any, tmp_path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")
    axes = [axes for number in pyplot.get_fignums() for axes in pyplot.figure(number).axes if axes.axison]
    assert axes
    for one in axes:
        assert one.get_ylabel()
        twins = one.get_shared_x_axes().get_siblings(one)
        assert any(other.get_xlabel() for other in twins)
    assert list(tmp_path.iterdir()) == [], "it writes beside itself"


def site_module(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SITE))
    return runpy.run_path(str(SITE / f"{name}.py"))


def test_names_page_has_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    module = site_module("tables", monkeypatch)
    page = module["names_page"]()
    for table in ("ACTIVATIONS", "LOSSES", "METRICS", "INITIALIZERS"):
        assert [name for name in module[table] if f"| `{name}` |" not in page] == []
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in page.splitlines() if row.startswith("|")]
    heads = [len(re.findall(r"\|", row)) for row in page.splitlines() if row.startswith("| ---")]
    assert set(widths) == set(heads)


def test_drawings_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (SITE / "how_it_works.md").read_text(encoding="utf-8")
    drawn: Callable[[], dict[str, bytes]] = site_module("drawings", monkeypatch)["draw_all"]
    found = drawn()
    assert {f"drawings/{name}" for name in found} == set(re.findall(r"drawings/\w+\.svg", page))
    assert all(b"</svg>" in content for content in found.values())


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("b.html", False),
        ("b.html#there", False),
        ("c.html", True),
        ("b.html#nowhere", True),
        ("https://a.org/x", False),
    ],
)
def test_broken_links_are_found(link: str, broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.html").write_text(f'<a href="{link}">a</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    found = site_module("build", monkeypatch)["broken_links"](tmp_path)
    assert found == ([f"a.html: {link}"] if broken else [])
