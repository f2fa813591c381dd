"""The looks of the report: one stylesheet and the few shapes that its sections are made of.

Everything that comes in as plain text is escaped here; `Html` marks text that already is markup. Knows nothing of runs.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import NewType

MAX_NARROW = 5
"""Columns of a table that fit without care."""
_INTERVAL = re.compile(r"\[(\S+), (\S+)\]")

Html = NewType("Html", str)
"""Markup that is safe to put into a page."""

STYLE = """
:root{color-scheme:light dark;--paper:#fefefe;--card:#f4f6f8;--ink:#1b2530;--soft:#566372;--line:#d5dbe1;
--accent:#0072b2;--quiet:#8a94a0;--good:#007a5a;--warn:#b34700}
@media(prefers-color-scheme:dark){:root{--paper:#12171d;--card:#1b222b;--ink:#e6ebf0;--soft:#9aa7b4;--line:#333e4a;
--accent:#56b4e9;--quiet:#7d8894;--good:#3fcf9f;--warn:#ff9d5c}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
main{max-width:1020px;margin:0 auto;padding:28px 20px 64px}
header p,.note{color:var(--soft);margin:.25em 0}
h1{font-size:1.2rem;font-weight:600;margin:0}
h2{font-size:1.15rem;margin:0 0 .7rem}
section{border-top:1px solid var(--line);padding:1.6rem 0 1.1rem}
.hero{padding:1.2rem 0 1.5rem}
.big{font-size:clamp(2.9rem,10vw,4.4rem);line-height:1.05;font-weight:700;letter-spacing:-.03em;margin:.2rem 0;
display:flex;flex-wrap:wrap;align-items:baseline;gap:.3rem .9rem;white-space:nowrap}
.unknown{font-size:1.9rem;color:var(--soft);white-space:normal}
.big small{font-size:1.05rem;line-height:1.45;font-weight:400;letter-spacing:0;color:var(--soft);white-space:normal}
.verdict{font-size:1.12rem;max-width:46em;margin:.4rem 0 .8rem}
.badge{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:.05rem .7rem;font-size:.86rem;
font-weight:600}
.good{color:var(--good)}.warn{color:var(--warn)}.plain{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:1rem 0 0}
.tile{background:var(--card);border-radius:10px;padding:.7rem .9rem}
.tile b{display:block;font-size:1.3rem;line-height:1.3;letter-spacing:-.01em}
.tile span{color:var(--soft);font-size:.88rem}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:20px 32px;
align-items:start}
.columns>*{min-width:0}
svg{display:block;width:100%;max-width:500px;height:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.4rem .9rem .4rem 0;border-bottom:1px solid var(--line)}
th{font-weight:500;color:var(--soft)}tbody th{width:32%}thead th{font-size:.88rem}
td:last-child,th:last-child{padding-right:0}
.scroll{overflow-x:auto}.wide th,.wide td{overflow-wrap:break-word}.wide tbody th{width:auto}
.bars{table-layout:fixed}.bars td{border:0;padding:.16rem .7rem .16rem 0}.bars td:first-child{width:34%}
.bars td:nth-child(3){width:6.6rem}.bars td:nth-child(4){width:4.2rem}.bars td:last-child{width:4.2rem;padding-right:0}
.bars td:nth-child(n+3){text-align:right;white-space:nowrap}
.bar{background:var(--card);border-radius:3px;height:.8rem;margin-top:.36rem;overflow:hidden}
.bar i{display:block;height:100%;min-width:2px;background:var(--accent);border-radius:3px}
ul{padding-left:1.15rem;margin:.2rem 0}li{margin:.35rem 0}
code{font:.88em ui-monospace,Menlo,Consolas,monospace;background:var(--card);border-radius:4px;padding:.1em .35em}
details{border-top:1px solid var(--line);padding:.9rem 0}summary{cursor:pointer;font-weight:600}
pre{background:var(--card);border-radius:8px;padding:.9rem;font:.8rem/1.5 ui-monospace,Menlo,Consolas,monospace;
white-space:pre-wrap}
@media(max-width:560px){main{padding:18px 14px 40px}
.tiles{grid-template-columns:1fr 1fr}.stack thead{display:none}.stack tr{display:block;border-bottom:1px solid
var(--line);padding:.45rem 0}.stack tbody th,.stack td{display:block;
width:100%;border:0;padding:.05rem 0}
.stack td[data-name]::before{content:attr(data-name) ": ";color:var(--soft)}}
@media print{details{display:none}}
"""


def text(value: object) -> Html:
    """Plain text as markup; None is a dash, for unknown."""
    return Html("&ndash;" if value is None else html.escape(str(value)))


def join(parts: Iterable[Html]) -> Html:
    """Markup after markup."""
    return Html("".join(parts))


def tag(name: str, content: Html, css: str = "") -> Html:
    """One element, with a class where given."""
    attribute = f' class="{css}"' if css else ""
    return Html(f"<{name}{attribute}>{content}</{name}>")


def paragraph(value: str, css: str = "") -> Html:
    """One paragraph of plain text."""
    return tag("p", text(value), css)


def section(title: str, *parts: Html) -> Html:
    """A titled section."""
    return tag("section", join([tag("h2", text(title)), *parts]))


def columns(*parts: Html) -> Html:
    """Beside each other where there is room, else below."""
    return tag("div", join(tag("div", part) for part in parts if part), "columns")


def tiles(items: Iterable[tuple[str, str]]) -> Html:
    """Figures with their (label, value)."""
    cells = [tag("div", join([tag("b", text(value)), tag("span", text(label))]), "tile") for label, value in items]
    return tag("div", join(cells), "tiles")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table whose first column names the row; on a phone each row becomes a small card."""
    top = tag("thead", tag("tr", join(tag("th", text(name)) for name in head))) if any(head) else Html("")
    body = []
    for first, *rest in rows:
        cells = [
            Html(f'<td data-name="{text(name)}">{_cell(value)}</td>') if name else tag("td", _cell(value))
            for name, value in zip(head[1:], rest, strict=True)
        ]
        body.append(tag("tr", join([tag("th", text(first)), *cells])))
    if not any(head):
        return tag("table", join([top, tag("tbody", join(body))]))
    found = tag("table", join([top, tag("tbody", join(body))]), "stack wide" if len(head) > MAX_NARROW else "stack")
    return tag("div", found, "scroll") if len(head) > MAX_NARROW else found


def _cell(value: object) -> Html:
    """A cell in which an interval does not break."""
    return Html(_INTERVAL.sub(r"[\1,&nbsp;\2]", text(value)))


def bars(items: Iterable[tuple[str, float, Sequence[str]]]) -> Html:
    """Horizontal bars as (name, share of the full width, texts to the right)."""
    rows = []
    for name, share, texts in items:
        width = 100 * min(1.0, max(0.0, share))
        bar = Html(f'<div class="bar"><i style="width:{width:.2f}%"></i></div>')
        rows.append(tag("tr", join([tag("td", text(name)), tag("td", bar), *(tag("td", text(it)) for it in texts)])))
    return tag("table", tag("tbody", join(rows)), "bars")


def bullets(items: Iterable[str]) -> Html:
    """A list; what stands between backquotes is code."""
    return tag("ul", join(tag("li", _with_code(item)) for item in items))


def _with_code(item: str) -> Html:
    parts = item.split("`")
    return join(tag("code", text(part)) if number % 2 else text(part) for number, part in enumerate(parts))


def folded(title: str, content: str) -> Html:
    """Preformatted plain text behind its title."""
    return tag("details", join([tag("summary", text(title)), tag("pre", text(content))]))


def page(title: str, body: Html) -> str:
    """The whole page; its policy forbids scripts and everything from outside."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )
