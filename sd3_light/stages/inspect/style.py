"""The page's look: light and dark by the reader's own wish, from a telephone's width up."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf8; --card: #ffffff; --ink: #1d1b19; --soft: #625d57; --line: #dfdad3; --bar: #2f6f8f;
  --track: #ece8e1; --warn: #8a4b00; --warn-ground: #fff3dd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #16171a; --card: #1f2125; --ink: #ebe8e3; --soft: #aaa59d; --line: #373a40; --bar: #68b1d3;
    --track: #2b2e34; --warn: #ffc978; --warn-ground: #33270f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", "PingFang SC",
    "Microsoft YaHei", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .25rem 0 .75rem; max-width: 48rem; }
a { color: var(--bar); }
code, .key { font: .85em/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.soft { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0 0; }
.notes { background: var(--warn-ground); color: var(--warn); border-radius: .5rem; padding: .75rem 1rem;
  margin: 1.25rem 0; }
.notes p { margin: .25rem 0; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; line-height: 1.35; display: block; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: middle; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
th { font-weight: 500; }
td { overflow-wrap: anywhere; }
td:last-child { padding-right: 0; }
.bars th { white-space: nowrap; width: 1%; }
.buckets td:nth-child(2) { width: 1%; }
.reasons th { white-space: normal; width: 50%; }
.reasons th div { font-weight: 400; font-size: .85rem; line-height: 1.35; }
.bars td.number { text-align: right; white-space: nowrap; width: 1%; }
.facts th { width: 12rem; vertical-align: top; }
.shape { display: block; margin: auto; }
.shape rect { fill: var(--track); stroke: var(--bar); }
.track { background: var(--track); border-radius: .2rem; height: .8rem; min-width: 3rem; }
.track i { display: block; background: var(--bar); border-radius: .2rem; height: 100%; min-width: 2px; }
.columns { display: flex; align-items: flex-end; gap: 2px; height: 9rem; border-bottom: 1px solid var(--line); }
.columns i { flex: 1 1 0; background: var(--bar); border-radius: .15rem .15rem 0 0; min-width: 0; }
.columns i.none { background: none; }
.under { display: flex; gap: 2px; color: var(--soft); font-size: .75rem; font-variant-numeric: tabular-nums; }
.under span { flex: 1 1 0; min-width: 0; overflow: visible; white-space: nowrap; text-align: left; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.5rem 2.5rem; }
.pair > div { min-width: 0; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); }
details table { max-width: 24rem; }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); gap: 1rem; }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; min-width: 0;
  display: flex; flex-direction: column; gap: .5rem; }
.pictures { display: flex; gap: .5rem; align-items: flex-start; }
figure { margin: 0; flex: 1 1 0; min-width: 0; }
figure img, .missing { display: block; width: 100%; border-radius: .25rem; background: var(--track); }
figure img, .thumbnail img { outline: 1px solid var(--line); }
img.small { image-rendering: pixelated; }
figcaption { color: var(--soft); font-size: .75rem; line-height: 1.3; margin-top: .2rem; }
.missing { display: flex; align-items: center; justify-content: center; text-align: center; color: var(--soft);
  font-size: .75rem; line-height: 1.3; padding: .4rem; overflow: hidden; overflow-wrap: anywhere; }
.caption { margin: 0; overflow-wrap: anywhere; white-space: pre-line; }
.sample details { margin: 0; }
.long summary { display: block; color: var(--ink); }
.long .caption { display: block; }
.long:not([open]) .caption { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 4;
  overflow: hidden; }
.long .soft { font-size: .8rem; text-decoration: underline dotted; }
.sample ol { margin: .25rem 0 0; padding-left: 1.5rem; overflow-wrap: anywhere; }
.sample .foot { margin-top: auto; color: var(--soft); font-size: .8rem; overflow-wrap: anywhere; }
.rejects { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(9.5rem, 45%), 1fr)); gap: .75rem; }
.reject { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem; min-width: 0;
  font-size: .8rem; line-height: 1.35; overflow-wrap: anywhere; }
.plain { margin: .25rem 0; padding-left: 1.25rem; font-size: .85rem; overflow-wrap: anywhere; columns: 24rem; }
.plain li { break-inside: avoid; }
.thumbnail { height: 7.5rem; display: flex; align-items: center; justify-content: center; margin-bottom: .4rem; }
.thumbnail img { max-width: 100%; max-height: 100%; border-radius: .25rem; }
.thumbnail .missing { height: 100%; }
@media (max-width: 34rem) {
  .facts, .facts tbody, .facts tr, .facts th, .facts td { display: block; width: auto; }
  .facts th { border: 0; padding-bottom: 0; color: var(--soft); }
}
"""
