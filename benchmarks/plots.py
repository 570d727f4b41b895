"""Pictures of results, on a matplotlib figure that the caller makes and saves."""

from collections.abc import Mapping, Sequence
from typing import Any


def bars(figure: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """One bar for each variant's median tokens per second, with its lowest and highest repeat."""
    axes = figure.subplots()
    names = [row["variant"] for row in rows]
    medians = [row["tokens/s"] for row in rows]
    below = [row["tokens/s"] - row["lowest"] for row in rows]
    above = [row["highest"] - row["tokens/s"] for row in rows]
    colours = ["tab:blue" if name.startswith("Truedraft") else "tab:grey" for name in names]
    places = axes.barh(names, medians, xerr=[below, above], color=colours, capsize=3)
    axes.bar_label(places, [f"{median:.1f}" for median in medians], padding=6)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second (median, lowest, highest)")
    axes.set_title(title)
    axes.margins(x=0.12)


def lines(
    figure: Any,
    series: Mapping[str, Mapping[float, float]],
    title: str,
    x_label: str,
    y_label: str,
) -> None:
    """One line for each series, by its x values."""
    axes = figure.subplots()
    for name, points in series.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    if series:
        axes.legend()


def stacked(figure: Any, rows: Sequence[Mapping[str, Any]], parts: Sequence[str], title: str) -> None:
    """One bar for each row, made of ``parts`` milliseconds; rows are named by ``variant``."""
    axes = figure.subplots()
    names = [row["variant"] for row in rows]
    lefts = [0.0] * len(rows)
    for part in parts:
        widths = [row[f"{part}_ms"] for row in rows]
        axes.barh(names, widths, left=lefts, label=part)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a round")
    axes.set_title(title)
    axes.legend()


def panels(
    figure: Any,
    by_panel: Mapping[str, Mapping[str, Mapping[float, float]]],
    x_label: str,
    y_label: str,
    highlight: str,
) -> None:
    """A small plot for each panel, its series as lines over a logarithmic axis; ``highlight`` stands out."""
    figure.set_size_inches(13, 6.5)
    columns = min(4, len(by_panel))
    rows = -(-len(by_panel) // columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes, (title, series) in zip(grid, by_panel.items(), strict=False):
        for name, points in series.items():
            stands_out = name == highlight
            axes.plot(
                list(points),
                list(points.values()),
                marker="o",
                markersize=6 if stands_out else 3,
                linewidth=2.5 if stands_out else 1,
                color="black" if stands_out else None,
                label=name,
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in series.values() for x in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.axhline(1, color="tab:grey", linewidth=0.5)
    for axes in grid[len(by_panel) :]:
        axes.set_visible(False)
    grid[0].set_ylabel(y_label)
    grid[0].legend(fontsize="small")
    figure.supxlabel(x_label)
