"""How predictions of a network run on a card, in words: the launches for few and for many rows.  It needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping

from ....plan import Plan
from ....text import table
from ..inference.tiers import DTYPES, find_nonfinite
from ..kernels import network_forward
from ..kernels.launches import Launch
from ..lower.lowering import lower, passes
from ..select.inference import card_checks_inputs, most_rows, piece_rows, row_tiers, rows_in_flow
from ..select.network import FewRowsNetwork, few_rows_network
from ..select.select import Selected, reasons
from ..select.setting import Setting

SHOWN_ROWS = (1, 100, 100_000)  # of the predictions that are described


def describe_predictions(plan: Plan, multiprocessors: int, arch: str, source: str) -> str:
    """The launches of predictions from arrays of the host, each with its operation's path and the reason for it.

    Args:
        plan: of a prediction; its capacity does not matter.
        source: of the inputs, ``"float32"`` or ``"uint8"``.
    """
    plan = plan.with_capacity(most_rows())
    setting = Setting(multiprocessors, arch, source, textured=False)
    return "\n\n".join(_describe(plan, setting, rows) for rows in SHOWN_ROWS)


def _describe(plan: Plan, setting: Setting, rows: int) -> str:
    """A prediction of so many rows."""
    what = f"a prediction of {rows:,} row{'s' * (rows > 1)}: "
    network = few_rows_network(plan, setting)
    if isinstance(network, FewRowsNetwork) and network.takes(rows):
        return f"{what}{network}: {network.why}\n{_one_launch(network, setting.source, rows)}"
    item_bytes = DTYPES[setting.source].itemsize
    most = piece_rows(plan, item_bytes)
    tier = plan.with_capacity(next((each for each in row_tiers(most) if rows <= each), most))
    lowered = lower(
        tier, multiprocessors=setting.multiprocessors, source=setting.source, textured=False, arch=setting.arch
    )
    launches = list(lowered.evaluation)
    if card_checks_inputs(setting.source, tier.capacity):
        launches.append(find_nonfinite(tier, setting.multiprocessors))
    head = f"{what}{len(launches)} launches, made for up to {tier.capacity:,} rows, as a graph"
    if rows > tier.capacity:
        piece = rows_in_flow(rows, item_bytes * plan.n_in, tier.capacity)
        head += f" for each piece of {piece:,}: while one is computed, another goes up and one comes back"
    parts = [head]
    if isinstance(network, str) and rows == SHOWN_ROWS[0]:
        parts.append(f"the network is not one launch: {network}")
    if lowered.evaluation_begin:
        names = ", ".join(launch.entry.name for launch in lowered.evaluation_begin)
        parts.append(f"once, when parameters have changed: {names}")
    selection = passes(tier, setting).evaluation.selection
    parts += [f"tensor cores: {selection.operand_format.why}", _launches(launches, selection.operations)]
    return "\n".join(parts)


def _one_launch(network: FewRowsNetwork, source: str, rows: int) -> str:
    entry, blocks = network_forward(source), network.blocks(rows)
    return f"{entry.name}, {blocks} blocks of {entry.threads} threads, reads and writes the host's memory"


def _launches(launches: list[Launch], operations: tuple[Selected, ...]) -> str:
    """A row for each launch, with the path of its operation."""
    paths: Mapping[str, list[tuple[str, str]]] = {each.title: reasons(each) for each in operations}
    rows = [("operation", "kernel", "grid", "path", "why")]
    for launch in launches:
        found = paths.get(
            launch.operation,
            [("a launch", "not finite inputs are looked for here, unless the host does as it copies them")],
        )
        path, why = ("; ".join(column) for column in zip(*found, strict=True))
        rows.append((launch.operation, launch.entry.name, "×".join(map(str, launch.grid)), path, why))
    return table(rows, "<<<<<")
