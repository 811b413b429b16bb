"""What a kernel does to data and parameters, and what the host; whether targets are read through a texture."""

from __future__ import annotations

from collections.abc import Callable

from . import thresholds
from .setting import Verdict


def by_texture(elements: int, most_texels: int) -> Verdict:
    """Whether so many targets are read through a texture object, which has at most ``most_texels`` on this card."""
    if not thresholds.TEXTURES_ARE_USED:
        return Verdict(False, "textures are switched off")
    if elements <= most_texels:
        return Verdict(True, f"{elements:,} targets ≤ {most_texels:,} texels")
    return Verdict(False, f"{elements:,} targets > {most_texels:,} texels: plain loads read them")


def target_reads(*, textured: bool) -> str:
    """How kernels of a training step read targets, in words, with what it costs."""
    if textured:
        return "through a texture object, as promised; plain loads take 0.4 to 1.2 % less of a step on an H200"
    return "by plain loads"


def shard_costs(shards: int) -> str:
    """What a batch that is split over streams costs, or gains, in words."""
    return (
        f"{shards} streams, as asked: a stream gains time only if one launch leaves most of the card idle; on an H200 "
        "two to eight took 10 to 13 times as long for 784-128-10 at 128 rows, which leaves the persistent kernel, and "
        "1.3 to 9.9 times for 784-1024-1024-10 at 1,024 rows"
    )


def by_kernel(values: int) -> Verdict:
    """Whether a kernel of its own looks at so many parameters, or draws them."""
    least = thresholds.KERNEL_LEAST_VALUES
    which = "at least" if values >= least else "fewer than"
    return Verdict(values >= least, f"{values:,} values are {which} {least:,}")


def sorts_on_card(rows: int) -> Verdict:
    """Whether the card makes the orders of a set's epochs, if it has the room."""
    least = thresholds.SORT_LEAST_ROWS
    return Verdict(rows >= least, f"{rows:,} rows are {'at least' if rows >= least else 'fewer than'} {least:,}")


def sorts_on_card_after(seconds: float, *, is_compiled: Callable[[], bool]) -> Verdict:
    """Whether the card makes the orders of a small set's epochs, after it has waited so long for those of the host."""
    of_cached, of_others = thresholds.SORT_WAITED_SECONDS, thresholds.SORT_COMPILED_SECONDS
    holds = seconds >= of_others or (seconds >= of_cached and is_compiled())
    return Verdict(holds, f"the card has waited for {seconds:.3f} s: {of_others} are enough, {of_cached} if compiled")
