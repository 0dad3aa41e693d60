"""The look of all pages: light and dark by the reader's own wish, from a telephone's width up."""

BASE = """
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
.facts th { width: 12rem; vertical-align: top; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); }
@media (max-width: 34rem) {
  .facts, .facts tbody, .facts tr, .facts th, .facts td { display: block; width: auto; }
  .facts th { border: 0; padding-bottom: 0; color: var(--soft); }
}
"""
