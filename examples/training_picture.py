"""Draws the loss of two training runs and the loss scale of the fp16 one."""

import math
from pathlib import Path

from matplotlib.figure import Figure

BLUE, ORANGE, RED, GREY = "#1f77b4", "#e6550d", "#c0152f", "#666666"


def smooth(values: list[float]) -> list[float]:
    """Returns the running mean of `values` over a fiftieth of the run."""
    window = max(1, len(values) // 50)
    return [
        sum(part) / len(part)
        for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    ]


def draw(path: Path, fp32, fp16, unigram: float) -> None:
    """Writes the picture as a PNG file."""
    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    loss, scale = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))

    loss.axhline(unigram, color=GREY, linestyle=":", linewidth=1.2)
    loss.annotate(
        "unigram entropy",
        (1, unigram),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        color=GREY,
        ha="right",
    )
    for name, run, color, style in (
        ("fp32", fp32, BLUE, "-"),
        ("fp16", fp16, ORANGE, (0, (4, 2))),
    ):
        loss.plot(run.losses, color=color, alpha=0.25, linewidth=0.8)
        loss.plot(
            smooth(run.losses),
            color=color,
            linestyle=style,
            linewidth=2,
            label=f"{name}, validation {run.validation_loss:.3f} at the end",
        )
    loss.set_ylabel("training loss, nats a character")
    loss.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    gap = abs(fp16.validation_loss / fp32.validation_loss - 1)
    loss.set_title(
        f"The same small GPT in fp32 and in fp16: validation losses {gap:.1%} apart",
        loc="left",
    )

    steps = range(len(fp16.scales))
    scale.step(steps, fp16.scales, where="post", color=ORANGE, linewidth=2)
    scale.plot(
        fp16.skipped,
        [fp16.scales[i] for i in fp16.skipped],
        "x",
        color=RED,
        markersize=7,
        markeredgewidth=1.8,
        label=f"{len(fp16.skipped)} skipped steps",
    )
    scale.set_yscale("log", base=2)
    low, high = (math.log2(bound(fp16.scales)) for bound in (min, max))
    scale.set_yticks([2.0**exponent for exponent in range(int(high), int(low) - 1, -4)])
    scale.set_ylabel("loss scale of fp16")
    scale.set_xlabel("step")
    scale.legend(frameon=False, loc="upper right")

    for axes in (loss, scale):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
    figure.savefig(path, format="png")
