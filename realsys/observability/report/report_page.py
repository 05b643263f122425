"""The report's frame: one self-contained HTML page with its style, no script and no external file."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape

from realsys.config.extras import missing_module

# Nothing is fetched and nothing runs, whatever a sample answer or a log line says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1f2733; --soft: #5d6776; --line: #dfe3e8;
  --s0: #2f6fd0; --s1: #d9822b; --s2: #3f9a70; --good: #23794a; --bad: #b3362b; --warn: #94620a;
  --good-bg: #e6f4ec; --bad-bg: #fbeae8; --warn-bg: #fbf2de; --info-bg: #e8f0fb; --code: #eef0f3; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181e; --card: #1c222a; --ink: #e4e8ee; --soft: #9aa5b4; --line: #323b47;
  --s0: #6ea3f2; --s1: #eda654; --s2: #67c298; --good: #7fd3a4; --bad: #f19a90; --warn: #e9bd68;
  --good-bg: #1a3326; --bad-bg: #3c2322; --warn-bg: #372d18; --info-bg: #1c2c44; --code: #262e38; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.65rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 34px 0 10px; }
h3 { font-size: .92rem; margin: 0 0 4px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 6px 0; } .soft, .empty { color: var(--soft); } .small { font-size: .85rem; }
.badge { display: inline-block; padding: 2px 11px; border-radius: 999px; font-size: .85rem;
  font-weight: 600; vertical-align: middle; margin-left: 8px; }
.good { color: var(--good); background: var(--good-bg); }
.bad { color: var(--bad); background: var(--bad-bg); }
.warn { color: var(--warn); background: var(--warn-bg); }
.info { color: var(--s0); background: var(--info-bg); }
.card, .box { background: var(--card); border: 1px solid var(--line); border-radius: 9px;
  padding: 12px 14px; break-inside: avoid; }
.box.bad, .box.warn { color: var(--ink); } .box.bad { background: var(--bad-bg); border-color: var(--bad); }
.box.warn { background: var(--warn-bg); border-color: var(--warn); }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); }
.figures { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  margin-top: 18px; }
.figure b { display: block; font-size: 1.3rem; line-height: 1.3; font-weight: 650; }
.figure span { color: var(--soft); font-size: .82rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 10px; fill: var(--soft); } svg line.grid { stroke: var(--line); }
.line { fill: none; stroke-width: 1.7; stroke-linejoin: round; } .pale { opacity: .3; stroke-width: 1; }
.line.s0 { stroke: var(--s0); } .line.s1 { stroke: var(--s1); } .line.s2 { stroke: var(--s2); }
.dot.s0 { fill: var(--s0); } .dot.s1 { fill: var(--s1); } .dot.s2 { fill: var(--s2); }
.legend { font-size: .78rem; color: var(--soft); overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 10px; height: 3px; margin: 0 4px 3px 0; }
.legend i.s0 { background: var(--s0); } .legend i.s1 { background: var(--s1); }
.legend i.s2 { background: var(--s2); } .legend span { margin-right: 10px; display: inline-block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; }
td.bar { min-width: 110px; } td.bar div { background: var(--s0); height: 9px; border-radius: 3px;
  margin-top: 6px; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
  font-size: .84rem; }
code { background: var(--code); padding: 1px 5px; border-radius: 4px; overflow-wrap: anywhere; }
pre { background: var(--code); padding: 10px 12px; border-radius: 7px; margin: 8px 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.paper { background: #fff; border: 1px solid var(--line); border-radius: 9px; padding: 8px;
  break-inside: avoid; } .paper img { width: 100%; height: auto; display: block; }
.sample { margin-bottom: 12px; } .sides { display: grid; gap: 12px; grid-template-columns: 1fr 1fr; }
.sides h3 { color: var(--soft); } .answer { white-space: pre-wrap; overflow-wrap: anywhere; }
.tick { font-weight: 600; } .tick.yes { color: var(--good); } .tick.no { color: var(--bad); }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 40px; color: var(--soft); font-size: .82rem; }
@media (max-width: 620px) { .sides { grid-template-columns: 1fr; } main { padding: 18px 12px 40px; }
  .grid { grid-template-columns: minmax(0, 1fr); } .scroll table { min-width: 600px; }
  td code { overflow-wrap: normal; white-space: nowrap; } }
@media screen and (prefers-color-scheme: dark) { .paper { background: var(--card); }
  .paper img { filter: invert(.88) hue-rotate(180deg); } }
@media print { :root { --page: #fff; } main { max-width: none; padding: 0; }
  .grid { grid-template-columns: repeat(3, 1fr); }
  h2 { break-after: avoid; } }
"""


def page(title: str, sections: Iterable[str]) -> str:
    """Returns the whole document. ``sections`` are HTML; empty ones are omitted."""
    body = "\n".join(s for s in sections if s)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """Returns a section with a heading; "" if its body is empty."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def rows_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> str:
    """Returns a table of HTML cells; the last ``numbers`` columns are right-aligned."""
    first = len(head) - numbers

    def line(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(
            f"<{tag} class=n>{c}</{tag}>" if i >= first else f"<{tag}>{c}</{tag}>"
            for i, c in enumerate(cells)
        )
        return f"<tr>{inner}</tr>"

    body = "".join(line("td", row) for row in rows)
    titles = line("th", [escape(h) for h in head])
    return f'<div class="scroll"><table>{titles}{body}</table></div>'


def picture(png: bytes, description: str) -> str:
    """Returns an embedded PNG on white."""
    data = base64.b64encode(png).decode()
    return f'<div class="paper"><img alt="{escape(description)}" src="data:image/png;base64,{data}"></div>'


def drawn(draw: Callable[[], bytes], description: str) -> str:
    """The picture that ``draw`` returns, or what to install where matplotlib is missing."""
    try:
        return picture(draw(), description)
    except ModuleNotFoundError as error:
        problem = missing_module(error.name or "", where="report")
        if problem is None:
            raise
        text = f"No picture ({description}): {problem.what}. To have it: {problem.fix}"
        return f'<p class="empty">{escape(text)}</p>'


def duration_text(seconds: float) -> str:
    """Formats ``42 s``, ``3 min 20 s``, ``2 h 05 min``, ``1 d 03 h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, secs = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {secs:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"
