"""The look of what only this page shows, and the script of its slider."""

from sd3_light.runlog.page.chart_style import CHARTS, HOVER
from sd3_light.runlog.page.style import BASE

STYLE = (
    BASE
    + CHARTS
    + """
.grids { margin-bottom: 1.5rem; }
figure { margin: 0 0 1rem; }
figure img { display: block; max-width: 100%; height: auto; border-radius: .25rem; outline: 1px solid var(--line);
  background: var(--track); }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .3rem; font-variant-numeric: tabular-nums; }
.slider { display: flex; flex-wrap: wrap; gap: .25rem 1rem; align-items: center; margin: .5rem 0; }
.slider[hidden] { display: none; }
.slider input { flex: 1 1 16rem; max-width: 40rem; accent-color: var(--bar); min-width: 0; }
.slider output { font-size: .85rem; font-variant-numeric: tabular-nums; }
.prompts { margin: .25rem 0; padding-left: 1.5rem; font-size: .9rem; overflow-wrap: anywhere; }
.scroll { max-height: 30rem; overflow-y: auto; }
.events { font-size: .85rem; line-height: 1.35; }
.events thead th { color: var(--soft); position: sticky; top: 0; background: var(--ground); }
.events .when { white-space: nowrap; width: 1%; }
.events .number { text-align: right; width: 1%; white-space: nowrap; }
.events tbody th { white-space: nowrap; width: 1%; }
.events .bad th { color: var(--bad); }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem;
  font: .8rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (max-width: 34rem) {
  .events, .events tbody, .events tr, .events td, .events tbody th { display: block; width: auto; text-align: left; }
  .events thead { display: none; }
  .events tr { border-bottom: 1px solid var(--line); padding: .35rem 0; }
  .events td, .events tbody th { border: 0; padding: 0; }
  .events td:empty { display: none; }
  .events .number, .events .when { display: inline; color: var(--soft); }
  .events .number:not(:empty)::before { content: " · step "; }
}
"""
)

SCRIPT = (
    """
for (const grids of document.querySelectorAll('.grids')) {
  const slider = grids.querySelector('.slider');
  if (!slider) continue;
  const input = slider.querySelector('input'), output = slider.querySelector('output');
  const figures = [...grids.querySelectorAll('figure')];
  const show = () => {
    figures.forEach((figure, at) => { figure.hidden = at !== Number(input.value); });
    output.textContent = figures[input.value].querySelector('figcaption').textContent;
  };
  grids.querySelectorAll('figcaption').forEach(caption => { caption.hidden = true; });
  input.value = input.max;
  input.addEventListener('input', show);
  slider.hidden = false;
  show();
}
"""
    + HOVER
)
