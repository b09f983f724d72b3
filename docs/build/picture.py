"""Picture of a run as SVG: a row per trajectory, coloured by the policy version of each token."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from docs.build.pictured_run import PicturedRun

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Colours of policy versions, repeated; all distinct for readers with a colour deficiency."""
_DROPPED = "#c8c8c8"
_RESTS = "#777777"
_TICK, _ROW, _LEFT, _TOP = 6, 5, 76, 34
_FONT = 'font-family="sans-serif" font-size="10" fill="#333"'


def draw(run: PicturedRun) -> str:
    """Return the SVG text of a finished run; equal runs have equal texts."""
    rows = [t for t in run.trajectories.values() if t.tokens or t.dropped]
    height, width = _TOP + _ROW * len(rows) + 8, _LEFT + _TICK * run.ticks + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{run.schedule.preset}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="4" y="26" {_FONT}>trainer</text>',
        f'<text x="4" y="{_TOP + 10}" {_FONT}>trajectories</text>',
        *_bars(run.training, 18, 10),
    ]
    for number, trajectory in enumerate(rows):
        y = _TOP + _ROW * number
        lines += _bars(trajectory.dropped, y, _ROW - 1, fill=_DROPPED)
        lines += _bars(trajectory.tokens, y, _ROW - 1)
        lines += _bars(trajectory.rests, y + 2, 1, fill=_RESTS)
    for step, tick in enumerate(run.cuts, 1):
        x = _LEFT + _TICK * tick
        lines.append(f'<path d="M{x} 14V{height - 4}" stroke="#333" stroke-dasharray="2 2"/>')
        lines.append(f'<text x="{x + 2}" y="11" {_FONT}>cut {step}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _bars(versions: Mapping[int, int], y: int, height: int, fill: str = "") -> Iterator[str]:
    """Yield one rectangle per run of ticks with the same version."""
    ticks = enumerate(sorted(versions))
    # Consecutive ticks have the same difference from their position.
    for (_, version), group in groupby(ticks, key=lambda item: (item[1] - item[0], versions[item[1]])):
        taken = [tick for _, tick in group]
        colour = fill or COLOURS[version % len(COLOURS)]
        x, width = _LEFT + _TICK * taken[0], _TICK * len(taken)
        yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'
