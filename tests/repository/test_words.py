"""Words that the project has retired stand nowhere in their retired meaning: the field has words for these things."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".cuh", ".h", ".cpp", ".c", ".md", ".sh", ".toml", ".cfg"}
FOLDERS = ("benchmarks", "cuda", "datasets", "docs", "examples", "mlpgpu", "tests")
EVERYWHERE = ("",)
KERNELS = ("cuda/", "mlpgpu/backends/cuda/", "tests/kernels/kernel_cases/", "tests/kernels/shim/")
CUDA = ("cuda/",)
# Where also words that are common elsewhere are retired.
STRICT = ("cuda/", "mlpgpu/backends/cuda/", "tests/kernels/kernel_cases/", "tests/kernels/shim/products.cpp")


@dataclass(frozen=True)
class Retired:
    """A retired word.

    Attributes:
        pattern: of the word, between word boundaries.
        instead: what the field says.
        planted: a use that must be found.
        folders: beginnings of the paths where the word has its retired meaning.
        allowed: what else may stand there, as a pattern that takes the word in.
    """

    pattern: str
    instead: str
    planted: str
    folders: tuple[str, ...] = EVERYWHERE
    allowed: str = r"(?!)"

    def uses(self, text: str) -> Iterator[str]:
        """Each use, with what stands around it."""
        others = [match.span() for match in re.finditer(self.allowed, text)]
        for match in re.finditer(rf"(?<![A-Za-z0-9_])(?:{self.pattern})(?![A-Za-z0-9_])", text):
            if not any(begin <= match.start() and match.end() <= end for begin, end in others):
                yield f"{match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 40]!r}; say: {self.instead}"


WORDS = (
    Retired(r"[Mm]ails?|MAIL\w*|Mail\w+|\w+_mail|mail_\w+", "messages", "it comes as mail"),
    Retired(r"[Cc]ouriers?|COURIERS?", "producer warps", "is_there = courier() < 32"),
    Retired(r"[Cc]opiers?|COPIER\w*", "producer threads", "threads that are copiers"),
    Retired(r"[Ww]orkers?|[Mm]ultipliers?|MULTIPLIERS?\w*", "compute warps", "for (int i = worker();", CUDA),
    Retired(r"[Mm]overs?|MOVERS?\w*", "update warps", "MOVERS = 128"),
    Retired(
        r"[Rr]esident (?:kernels?|networks?)|Resident[A-Z]\w*|RESIDENT_\w+|resident_\d\w*",
        "persistent kernel",
        "inside a resident kernel",
    ),
    Retired(r"[Pp]lanes?|PLANES?|\w+_planes?|planes?_\w+|\w*Planes?", "components of split operands", "planes of x"),
    Retired(r"[Hh]and_?over\w*|\w*HandOver", "epilogue staging", "sums in hand_over"),
    Retired(r"patch(?:es)?|patch_\w+|\w+_patch|PATCH\w*", "staging tile", "write_patch(a)", CUDA),
    Retired(r"lay_out\w*|settle\w*|SETTLES", "stage, rescale", "settle(sums)", KERNELS),
    Retired(r"made again", "recomputed", "sums that are made again", KERNELS),
    Retired(r"\w+_lines|w_columns|x_columns|dz_columns", "row scales, column scales", "const int* x_lines", KERNELS),
    Retired(
        r"[Ll]ines?|LINES?\w*", "row, column, cache line, record", "a line of W", STRICT, r"cache lines?|command lines?"
    ),
    Retired(r"own_lines|OwnLines|gives? back|give_back|bring_\w+", "bulk tile, load, release", "give_back(w)", CUDA),
    Retired(r"KEPT|HELD|hold_bfloats|is_\w*doubtful", "registers, split, must_recompute", "held[HELD]", KERNELS),
    Retired(
        r"(?:float|double|int)\* parts|[Pp]arted\w*|PARTED\w*|parts of k|(?:bias|column)_?parts?|BIAS_PARTS",
        "split-K partials, partial sums",
        "float* parts[grid.x]",
        KERNELS,
    ),
    Retired(
        r"made of \w+ operands|by its readers|cut along|looked at|has left its|sums are atomic|no tail, one kernel",
        "what explain says, in the field's words",
        "float32 is made of half_pair operands",
        ("mlpgpu/backends/cuda/select/",),
    ),
    Retired(r"int early|\"early\"|early=|``early``", "prefetch", "int64_t size, int early, int k", KERNELS),
    Retired(r"taken in|takes? in", "fused", "a launch that is taken in", KERNELS),
    Retired(r"\w+_(?:tall|narrow)|dense_update_few|[Ff]ewUpdate", "large k, small n, few rows", "dense_tall", KERNELS),
    Retired(
        r"await_launch_before|allow_launch_after|follow_launch_before", "PDL wait, trigger", "await_launch_before();"
    ),
    Retired(r"[Cc]ourse|rows_turn|TURNS", "step range, output stage", "const Course& course", CUDA, r"course report"),
    Retired(r"[Dd]eals?|dealt|deal_\w+", "initialise, stage, divide", "blocks deal rows", KERNELS),
    Retired(r"pattern_\w+|parallel patterns", "primitives", "pattern_entries()"),
    Retired(r"in_hand|at_hand|its_\w+|own_\w+", "what it holds", "float* at_hand", CUDA),
    Retired(r"wanted|is_wanted", "needed, target, skipped", "what is null is not wanted", CUDA),
    Retired(r"way back", "backward pass", "on the way back", KERNELS),
    Retired(r"on (?:its|their) way", "in flight", "copies on their way", STRICT),
)


def texts() -> dict[str, str]:
    """The repository's text files by their paths; not this one, and no recorded results."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    kept = (path for path in paths if path.suffix in SUFFIXES and path != Path(__file__))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in kept}


TEXTS = texts()


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.instead)
def test_retired_words_stand_nowhere(word: Retired) -> None:
    found = [
        f"{path}: {use}" for path, text in TEXTS.items() if path.startswith(word.folders) for use in word.uses(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.instead)
def test_planted_use_is_found(word: Retired) -> None:
    (path, text) = next((path, text) for path, text in TEXTS.items() if path.startswith(word.folders))
    assert list(word.uses(f"{text}\n{word.planted}\n")), path
