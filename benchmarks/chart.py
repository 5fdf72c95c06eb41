"""Draws the times of iterations. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from inner import INNERS
from iteration import ITERATION
from lineup import LINEUP, LOOPS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rows import Row

OURS, TORCH, ORIGINAL, BARE = "#1b6ca8", "#e08e45", "#9aa0a6", "#222222"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes a picture: a row for each inner optimizer, a panel for each set of
    tensors, all with the most threads."""
    threads = max(row.threads for row in rows)
    shown = [r for r in rows if (r.threads, r.task) == (threads, ITERATION)]
    sets = list(dict.fromkeys(row.tensors for row in shown))
    figure = Figure(figsize=(4 * len(sets), 3.2 * len(INNERS)), layout="constrained")
    axes = figure.subplots(len(INNERS), len(sets), squeeze=False, sharey=True)
    for line, inner in zip(axes, INNERS, strict=True):
        for panel, tensors in zip(line, sets, strict=True):
            members = [r for r in shown if (r.tensors, r.inner) == (tensors, inner)]
            draw_panel(panel, {row.contestant: row for row in members})
            panel.set_title(f"{tensors}, {inner}")
    for panel in axes[-1]:
        panel.set_xlabel("ms an iteration")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_panel(panel: Axes, rows: dict[str, Row]) -> None:
    """Draws a bar for each contestant with its quartiles, and a mark where its bare
    pass is."""
    for place, name in enumerate(LINEUP):
        row = rows[name]
        low, high = row.quartiles
        panel.barh(
            place,
            row.seconds * 1e3,
            xerr=[[(row.seconds - low) * 1e3], [(high - row.seconds) * 1e3]],
            color=color(name),
            error_kw={"elinewidth": 1, "ecolor": BARE},
        )
        if row.to_bare is not None:
            mark = row.seconds / row.to_bare * 1e3
            label = "its bare pass" if place == 0 else None
            panel.plot(
                [mark, mark], [place - 0.4, place + 0.4], color=BARE, label=label
            )
    panel.set_yticks(range(len(LINEUP)), LINEUP)
    if not panel.yaxis_inverted():
        panel.invert_yaxis()
    panel.legend(loc="lower right", frameon=False, fontsize="small")


def color(contestant: str) -> str:
    if contestant == LOOPS:
        return ORIGINAL
    return OURS if contestant.startswith("fp16core") else TORCH
