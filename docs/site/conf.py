"""Sphinx's configuration.  ``build.py`` gathers what it reads, and runs it."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import mlpgpu

SITE = Path(__file__).parent

# Pages are the same whether or not the machine that builds them has a card.
os.environ["MLPGPU_BACKEND"] = "cpu"

project = "mlpgpu"
author = "The mlpgpu developers"
version = release = mlpgpu.__version__
html_title = f"mlpgpu {version}"
root_doc = "index"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
]

# Anchors of headings are GitHub's, by which the documents link to each other.
myst_heading_anchors = 4

autoclass_content = "class"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
# Names that stand for long unions are shown as names.
autodoc_type_aliases = {
    name: name
    for name in (
        *("ActivationName", "ArrayLike", "Data", "InitializerName", "LossName", "Metrics", "OptimizerName"),
        *("PrecisionName", "ReductionName"),
    )
}
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
# Docstrings have sections as napoleon's Google style reads them, which numpydoc does not.
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "navbar_align": "left",
}
html_sidebars: dict[str, list[str]] = {"index": [], "changes": [], "how_it_works": []}
html_show_sourcelink = html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
copyright = "the mlpgpu developers, MIT licence"

sphinx_gallery_conf = {
    "examples_dirs": [str(SITE / "gallery")],
    "gallery_dirs": ["gallery"],
    "filename_pattern": "/plot_",
    "within_subsection_order": "FileNameSortKey",
    "nested_sections": False,
    "abort_on_example_error": True,
    # A change of the package can change what an example shows.
    "run_stale_examples": True,
    "capture_repr": (),
    "image_srcset": ["2x"],
    "doc_module": ("mlpgpu",),
    "reference_url": {"mlpgpu": None},
    "show_memory": False,
    "write_computation_times": False,
}

linkcheck_ignore = [r"^http://localhost", r"^https://doi\.org/"]

# A warning of an example would stand on its page.
warnings.filterwarnings("ignore", category=UserWarning, message=".*FigureCanvasAgg is non-interactive.*")


@functools.cache
def shown_members(owner: type) -> frozenset[str]:
    """What Tab shows of an object of the class; the rest is the package's business alone."""
    try:
        return frozenset(owner.__dir__(object.__new__(owner)))
    except (AttributeError, TypeError):  # an abstract class, or one that lists what an object holds
        return frozenset(name for name in dir(owner) if not name.startswith("_"))


def skip_internal(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what only the package uses, and what estimators have of scikit-learn."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    if (getattr(function, "__module__", None) or "").startswith("sklearn"):
        return True
    path, _, last = getattr(function, "__qualname__", "").rpartition(".")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    owner = functools.reduce(lambda part, key: getattr(part, key, None), path.split("."), module)
    return True if isinstance(owner, type) and last == name and name not in shown_members(owner) else None


def name_aliases(
    app: Any, what: str, name: str, member: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show an alias in a union as its name alone."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, returned))


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", name_aliases)
    app.connect("autodoc-skip-member", skip_internal)
