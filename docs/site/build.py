"""Build the site: ``make docs``, or ``make docs-links`` for the links that lead out of it.

Sphinx reads build/site/source-html, which this script gathers: the pages of docs/site, the documents where the
repository has them, so that their links hold, the files that they link to, and drawings and tables made of the code.
The pages come to build/site/html.  Warnings are errors, and so is a link inside the site that leads nowhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from drawings import draw_all
from tables import names_page

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
BUILD = ROOT / "build" / "site"
HTML = BUILD / "html"

# What documents are, and what they link to.
DOCUMENTS = ("docs/**/*.md", "cuda/README.md", "datasets/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINKED = ("docs/*.png", "benchmarks/results/*", "LICENSE")


def put(path: Path, content: bytes) -> Path:
    """Write a file unless it holds this already: Sphinx reads again what has changed."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path


def gather(source: Path) -> None:
    """Make a folder Sphinx's source; what earlier builds left there of examples stays for this one."""
    kept = set()
    for page in [*SITE.glob("*.md"), *SITE.glob("reference/*"), *SITE.glob("_static/*")]:
        kept.add(put(source / page.relative_to(SITE), page.read_bytes()))
    for pattern in (*DOCUMENTS, *LINKED):
        for path in ROOT.glob(pattern):
            if not path.is_relative_to(SITE):
                kept.add(put(source / path.relative_to(ROOT), path.read_bytes()))
    kept.add(put(source / "reference" / "names.md", names_page().encode()))
    kept |= {put(source / "drawings" / name, content) for name, content in draw_all().items()}
    for path in source.rglob("*"):
        if path.is_file() and path not in kept and not path.is_relative_to(source / "gallery"):
            path.unlink()


class Page(HTMLParser):
    """The links of a page, and the anchors that others may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(folder: Path) -> list[str]:
    """Links between the pages in a folder, and to files in it, that lead nowhere."""
    paths = [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]  # there lie templates
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in paths}
    broken = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            anchor = unquote(parts.fragment)
            is_there = target.is_file() and (not anchor or target not in pages or anchor in pages[target].anchors)
            if not is_there and anchor not in ("#", "top"):
                broken.append(f"{path.relative_to(folder)}: {link}")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", action="store_true", help="check the links that lead out, by the network")
    arguments = parser.parse_args()
    # Links are looked for in pages of examples that are not run, which lie apart from those that are.
    builder, out = ("linkcheck", BUILD / "links") if arguments.links else ("html", HTML)
    options = ["-D", "plot_gallery=0"] if arguments.links else []
    source, trees = (BUILD / f"{folder}-{builder}" for folder in ("source", "doctrees"))
    gather(source)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", builder, "-c", str(SITE), *options]
    done = subprocess.run([*command, "-d", str(trees), str(source), str(out)])
    if done.returncode or arguments.links:
        return done.returncode
    broken = broken_links(HTML)
    print(*broken, sep="\n", end="\n" * bool(broken), file=sys.stderr)
    pages = len(list(HTML.rglob("*.html")))
    print(f"{pages} pages, {len(broken)} broken links: {HTML / 'index.html'}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
