"""One HTML file that needs nothing else: style inside, light and dark by the reader's preference."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2024; --soft: #60646c; --rule: #e0e3e8;
  --card: #f7f8fa; --bad: #c62a2f;
  --c0: #0b68cb; --c1: #d9480f; --c2: #2b8a3e; --c3: #862e9c; --c4: #b7791f; --c5: #0c8599; --c6: #c2255c;
  --c7: #5c6370; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e6e9ec; --soft: #9aa3ad;
  --rule: #31373d; --card: #1c2024; --bad: #ff8a80;
  --c0: #6cb2ff; --c1: #ff9d5c; --c2: #69d391; --c3: #d6a2f0; --c4: #f0c66b; --c5: #5cd3e2; --c6: #ff8fb8;
  --c7: #b5bcc6; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 1340px; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 12px; }
p.sub { color: var(--soft); margin: 0 0 16px; }
p.alarm { color: var(--bad); font-weight: 600; margin: 4px 0; }
.tiles, .charts { display: grid; gap: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); }
.tile { background: var(--card); border-radius: 8px; padding: 12px 16px; }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); }
figure { background: var(--card); border-radius: 8px; margin: 0; padding: 12px; }
figure.empty { color: var(--soft); }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 4px 12px; }
.key::before { background: var(--line); border-radius: 2px; content: ""; display: inline-block; height: 4px;
  margin: 0 6px 3px 0; width: 18px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--rule); padding: 5px 12px; text-align: right; vertical-align: top; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; } table.facts td { text-align: left; white-space: normal; }
svg { display: block; height: auto; width: 100%; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg text.title { fill: var(--ink); font-size: 15px; font-weight: 600; }
svg text.limit { fill: var(--bad); } svg line.limit { stroke: var(--bad); stroke-dasharray: 5 4; }
svg line.grid { stroke: var(--rule); }
svg polyline { fill: none; stroke: var(--line); stroke-linejoin: round; stroke-width: 2; }
svg polyline.dashed { stroke-dasharray: 4 4; } svg circle { fill: var(--line); }
svg line.bar { opacity: .55; stroke: var(--line); stroke-width: 1.5; }
""" + "".join(f".c{place} {{ --line: var(--c{place}); }}\n" for place in range(8))


def page(title: str, subtitle: str, alarms: Iterable[str], sections: Iterable[str]) -> str:
    """The whole document."""
    warnings = "".join(f'<p class="alarm">{html.escape(alarm)}</p>' for alarm in alarms)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="sub">{html.escape(subtitle)}</p>{warnings}'
        f"{''.join(sections)}</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what belongs to it."""
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def charts(*figures: str) -> str:
    """Charts beside one another."""
    return f'<div class="charts">{"".join(figures)}</div>'


def tiles(pairs: Sequence[tuple[str, str]]) -> str:
    """The few figures that matter most, large."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in pairs
        )
        + "</div>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A table of texts; without `head` it has none."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    cells = (("".join(f"<td>{html.escape(cell)}</td>" for cell in row)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f'<div class="wide"><table class="{style}">'
        + (f"<thead><tr>{top}</tr></thead>" if head else "")
        + f"<tbody>{body}</tbody></table></div>"
    )
