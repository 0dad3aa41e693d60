"""The look of what only this page shows: samples, rejects, histograms."""

from sd3_light.runlog.page.style import BASE

STYLE = (
    BASE
    + """
.bars th { white-space: nowrap; width: 1%; }
.buckets td:nth-child(2) { width: 1%; }
.reasons th { white-space: normal; width: 50%; }
.reasons th div { font-weight: 400; font-size: .85rem; line-height: 1.35; }
.bars td.number { text-align: right; white-space: nowrap; width: 1%; }
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
"""
)
