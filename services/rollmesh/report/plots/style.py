"""Common style of all plots; functions that draw import matplotlib, never the module at startup.

Plots use separate ``Figure`` objects instead of pyplot, which requires global state and explicit clean-up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollmesh.errors import ConfigError
from rollmesh.file_writes import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK = "#1d2530"
MUTED = "#677281"
GRID = "#e3e7ec"
SURFACE = "#fefefe"
BLUE = "#3d7be0"
ORANGE = "#e0792e"
GREEN = "#2c9c74"
PURPLE = "#8b62cf"
RED = "#d04a54"
GREY = "#98a2af"

CSS_VARIABLES: Mapping[str, str] = {
    INK: "var(--plot-ink)",
    MUTED: "var(--plot-muted)",
    GRID: "var(--plot-grid)",
    SURFACE: "var(--surface)",
}
"""Colours of ``plots.mplstyle`` that follow the page's light or dark scheme when a plot is part of the page."""

WIDTH = 4.9
WIDE = 9.6
"""Widths in inches: of a plot in one column, and of a plot over the whole page."""


def style() -> Any:
    """Return the context manager for creating and saving figures.

    Raises ConfigError when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib: pip install 'rollmesh[report]'; of our images the gateway's has it"
        ) from error
    return matplotlib.rc_context(fname=Path(__file__).with_name("plots.mplstyle"))


def new_figure(width: float = WIDTH, height: float = 3.1) -> Figure:
    """Create an empty figure with a size in inches; call it inside ``style()``."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(figure: Figure, heights: Sequence[float]) -> list[Axes]:
    """Create stacked panels with a shared horizontal axis, labelled on the lowest panel only."""
    grid = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": list(heights)}, squeeze=False)
    return list(grid[:, 0])


def finish(axes: Axes, *, x: str, y: str, zero: bool = False, integer_x: bool = False, ticks: int = 5) -> None:
    """Set labels and a few ticks; ``zero`` starts the vertical axis at 0."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=integer_x, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=ticks))
    axes.margins(x=0.01)
    if zero:
        axes.set_ylim(bottom=0)


def legend(axes: Axes, *, columns: int = 4) -> None:
    """Add a legend in one row between title and panel, so that it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, columnspacing=1.3, borderpad=0.3
    )
    if title := axes.get_title(loc="left"):
        axes.set_title(title, pad=24.0)


def percent_axis(axes: Axes, top: float | None = 1.0) -> None:
    """Format the vertical axis as percentages; ``top`` None scales it to the data."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.set_ylim(bottom=0, top=top)


def decades(axes: Axes, values: npt.NDArray[np.float64]) -> None:
    """Set a logarithmic vertical axis over the whole decades around ``values``."""
    from matplotlib.ticker import FixedLocator, NullLocator

    positive = values[values > 0]
    if len(positive) == 0:
        return
    low, high = math.floor(np.log10(positive.min())), math.ceil(np.log10(positive.max()))
    high = max(high, low + 1)
    axes.set_yscale("log")
    axes.set_ylim(10.0**low, 10.0**high)
    step = max(1, (high - low) // 2)
    axes.yaxis.set_major_locator(FixedLocator([10.0**e for e in range(low, high + 1, step)]))
    axes.yaxis.set_minor_locator(NullLocator())


def thousands(axis: Axis) -> None:
    """Format the numbers of an axis as ``1.5k`` or ``2M``."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def short_number(value: float) -> str:
    """Format a number as ``12``, ``1.5k``, ``20k`` or ``3.2M``."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def version_colours(versions: Sequence[int]) -> list[Any]:
    """Return one RGBA colour of a ramp per policy version, from old to new."""
    from matplotlib import colormaps

    ramp = colormaps["viridis"]
    if len(versions) < 2:
        return [ramp(0.45)] * len(versions)
    low, high = versions[0], versions[-1]
    return [ramp(0.1 + 0.84 * (v - low) / (high - low)) for v in versions]


def version_bar(figure: Figure, axes: Axes, versions: Sequence[int]) -> None:
    """Add the colour ramp as a bar instead of one legend entry per version."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    low, high = versions[0], versions[-1]
    if low == high:
        axes.set_title(f"policy version {low}", loc="right", fontsize=8.5, color=MUTED, fontweight="normal")
        return
    ramp = ListedColormap(version_colours([int(v) for v in np.linspace(low, high, 48)]))
    bar = figure.colorbar(ScalarMappable(Normalize(low, high), ramp), ax=axes, fraction=0.03, pad=0.015, aspect=28)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(nbins=6, integer=True)
    bar.update_ticks()
    bar.set_label("policy version", color=MUTED)


def save(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write ``name.svg`` and ``name.png`` (double density) and return their paths."""
    # The layout does not depend on the format: compute it once, without a drawing. With a layout engine, even "none",
    # every file would be drawn twice.
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine(None)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with writing(svg):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    with writing(png):
        figure.savefig(png, format="png", dpi=200)
    return svg, png


def for_page(svg: str, name: str) -> str:
    """Convert a saved plot to an ``<svg>`` element for a page: scheme-aware colours, ids prefixed with ``name``."""
    text = svg[svg.index("<svg") :]
    for colour, variable in CSS_VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    # The page sets the width; the view box keeps the proportions.
    return re.sub(r'<svg ([^>]*?)width="[^"]*pt" height="[^"]*pt"', r"<svg \1", text, count=1)
