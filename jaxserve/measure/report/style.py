"""The page's style sheet. Colours are variables: light, dark, and in print.

Series colours are those of Okabe and Ito, told apart with any colour vision; the darker or lighter
of a hue, so that each stands out from its ground by 3 to 1. Lines differ by their dashes too.
"""

from typing import Final

SERIES: Final = (
    # light, dark, dashes of a line
    ("#0072b2", "#56b4e9", ""),
    ("#c24a00", "#f0a030", "7 3"),
    ("#007a5a", "#2cc79a", "2 3"),
    ("#a3407a", "#e39cc4", "9 3 2 3"),
    ("#7a6400", "#f0e442", "4 2"),
    ("#555b66", "#b5bcc8", "1 2"),
)
_LIGHT: Final = (
    "--ground:#fff;--card:#f7f8fa;--ink:#1b1f24;--soft:#57606a;--grid:#e1e4e8;--edge:#d0d7de;"
    "--heat:#0a4f8a;--warn:#fff4d6;--warn-edge:#b58100;--rule:#1b1f24;"
) + "".join(f"--c{place}:{light};" for place, (light, _, _) in enumerate(SERIES))
_DARK: Final = (
    "--ground:#0f1318;--card:#171c23;--ink:#e6eaef;--soft:#a3adb8;--grid:#2a313a;--edge:#333c47;"
    "--heat:#3d8fd0;--warn:#3a2f10;--warn-edge:#d9a520;--rule:#e6eaef;"
) + "".join(f"--c{place}:{dark};" for place, (_, dark, _) in enumerate(SERIES))
_SERIES_RULES: Final = "".join(
    f".line.c{place},.whisker.c{place}{{stroke:var(--c{place})}}"
    f".bar.c{place},.area.c{place}{{fill:var(--c{place})}}"
    + (f".line.c{place}{{stroke-dasharray:{dashes}}}" if dashes else "")
    for place, (_, _, dashes) in enumerate(SERIES)
)
STYLE: Final = (
    f":root{{color-scheme:light dark;{_LIGHT}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    f"@media print{{:root{{color-scheme:light;{_LIGHT}}}}}\n"
    """\
*{box-sizing:border-box}
body{margin:0 auto;max-width:1260px;padding:16px;background:var(--ground);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:0 0 4px;line-height:1.2}
h2{font-size:1.15rem;margin:32px 0 8px;padding-top:8px;border-top:1px solid var(--edge)}
h3{font-size:1rem;margin:0 0 2px}
p{margin:0 0 8px}
a{color:var(--c0)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0}
dl.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:4px 24px;
margin:12px 0;font-size:.87rem}
dl.facts dt{color:var(--soft);font-size:.8rem}
dl.facts dd{margin:0 0 4px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(164px,1fr));gap:10px;
margin:16px 0}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px}
.tile .name{color:var(--soft);font-size:.8rem}
.tile .value{font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.25}
.tile .more{color:var(--soft);font-size:.8rem}
.warnings{background:var(--warn);border:1px solid var(--warn-edge);border-left-width:5px;
border-radius:6px;padding:8px 12px 8px 28px;margin:12px 0}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:16px;
align-items:start}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--edge);
border-radius:8px;min-width:0}
figcaption p{color:var(--soft);font-size:.8rem;margin:0 0 8px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 6px;padding:0;
font-size:.8rem}
.legend li{display:flex;align-items:center;gap:6px}
.legend svg{flex:none}
svg.plot{display:block;width:100%;height:auto;max-width:500px}
.plot text{font-size:12px;fill:var(--ink);font-family:inherit;font-variant-numeric:tabular-nums}
.plot .label{fill:var(--soft)}
.plot .small{font-size:10px}
.plot .end{text-anchor:end}
.plot .mid{text-anchor:middle}
.plot .halo{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.plot .grid{display:inline;stroke:var(--grid);fill:none}
.plot .axis,.plot .tick{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.whisker{fill:none;stroke-width:1.5}
.area{fill-opacity:.22}
.rule{stroke:var(--rule);stroke-width:1.3;stroke-dasharray:5 4;fill:none}
.track{fill:var(--grid)}
.heat{fill:var(--heat);stroke:var(--edge)}
.none{fill:none}
details{margin-top:8px;font-size:.87rem}
summary{cursor:pointer;color:var(--soft)}
section>details,footer>details,.card{background:var(--card);border:1px solid var(--edge);
border-radius:8px;padding:8px 12px;margin:12px 0}
.card{margin:0;min-width:0}
.card details{margin:0}
.scroll{overflow-x:auto;max-height:420px;overflow-y:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin-top:6px;font-size:.82rem;
overflow-wrap:normal}
th,td{text-align:right;padding:2px 8px;border-bottom:1px solid var(--grid);vertical-align:top}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child,table.words th,table.words td{text-align:left}
table.words td{overflow-wrap:anywhere;min-width:5em}
footer table.words td:first-child{min-width:11em}
.absent{color:var(--soft);font-size:.87rem;margin-top:10px}
footer{margin-top:32px;border-top:1px solid var(--edge);padding-top:8px}
@media print{
@page{margin:12mm}
body{max-width:none;padding:0;font-size:9.5pt}
h2{margin-top:16px}
nav{display:none}
.grid{display:block;columns:2;column-gap:10px}
.grid>*{margin:0 0 10px}
.tiles{grid-template-columns:repeat(5,1fr)}
.tile .value{font-size:1.05rem}
figure,.card,.tile,tr{break-inside:avoid}
h2,h3{break-after:avoid}
figure details{display:none}
details.printed::details-content{content-visibility:visible}
.scroll{overflow:visible;max-height:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
""" + _SERIES_RULES
)
