"""The look of curves, and the script that tells values under the pointer. Without it the curves are all there."""

CHARTS = """
:root {
  --c0: #2f6f8f; --c1: #b4532a; --c2: #3d7a4a; --c3: #7d4f9e; --c4: #97731a; --c5: #a33a5f;
  --q1: #3b4cc0; --q2: #4f7de0; --q3: #4b9fd0; --q4: #35a79c; --q5: #4f9a4a; --q6: #8f9a20; --q7: #c08a10;
  --q8: #d0661e; --q9: #c23b2e; --q10: #8e1f3f; --bad: #c22a2a; --mark: #8b857d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --c0: #68b1d3; --c1: #f0916a; --c2: #80c48d; --c3: #c29be0; --c4: #ddb963; --c5: #ea8bad;
    --q1: #8b9bff; --q2: #79aaff; --q3: #6cc3f0; --q4: #5fd0c2; --q5: #83cf7b; --q6: #c6cf5c; --q7: #ebbb4e;
    --q8: #f49a5a; --q9: #f2796b; --q10: #e0699a; --bad: #ff7b70; --mark: #8f8a83;
  }
}
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.5rem 2rem; }
.chart { min-width: 0; }
.chart h3 { margin: .25rem 0; }
.chart p { font-size: .85rem; line-height: 1.4; margin: 0 0 .35rem; }
.charts > .wide { grid-column: 1 / -1; min-width: 0; }
.wide .area { height: 17rem; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .8rem; color: var(--soft);
  margin-bottom: .4rem; font-variant-numeric: tabular-nums; }
.legend b { color: var(--ink); font-weight: 600; }
.legend i { display: inline-block; width: 1rem; height: .25rem; border-radius: .1rem; margin-right: .35rem;
  vertical-align: middle; background: var(--colour); }
.legend i.faint { opacity: .4; }
.legend i.resume { width: 0; height: .8rem; border-left: 1px dashed var(--mark); border-radius: 0; background: none; }
.legend i.broken { width: 0; height: .6rem; border-left: 2px solid var(--bad); border-radius: 0; background: none; }
.plot { display: grid; grid-template-columns: 3.2rem 1fr; position: relative; font-size: .75rem; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.area { position: relative; height: 12rem; background: var(--card); border: 1px solid var(--line); min-width: 0; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; pointer-events: none; }
.ys, .xs { position: relative; }
.ys span { position: absolute; right: .4rem; transform: translateY(50%); line-height: 1; white-space: nowrap; }
.xs { grid-column: 2; height: 1.2rem; margin: 0 1px; }
.xs span { position: absolute; transform: translateX(-50%); top: .2rem; line-height: 1; white-space: nowrap; }
.axis { grid-column: 2; text-align: right; line-height: 1.2; }
.area polyline, .area path { fill: none; stroke: var(--colour); stroke-width: 1.75px; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.area polyline.faint { opacity: .4; stroke-width: 1px; }
.area path.dots { stroke-width: 5px; stroke-linecap: round; }
.area path.faint { display: none; }
.area line { vector-effect: non-scaling-stroke; stroke-width: 1px; }
.area .grid { stroke: var(--line); }
.area .resume { stroke: var(--mark); stroke-dasharray: 4 3; }
.area .broken { stroke: var(--bad); stroke-width: 2px; }
.c0 { --colour: var(--c0); } .c1 { --colour: var(--c1); } .c2 { --colour: var(--c2); } .c3 { --colour: var(--c3); }
.c4 { --colour: var(--c4); } .c5 { --colour: var(--c5); }
.q1 { --colour: var(--q1); } .q2 { --colour: var(--q2); } .q3 { --colour: var(--q3); } .q4 { --colour: var(--q4); }
.q5 { --colour: var(--q5); } .q6 { --colour: var(--q6); } .q7 { --colour: var(--q7); } .q8 { --colour: var(--q8); }
.q9 { --colour: var(--q9); } .q10 { --colour: var(--q10); }
.tip { position: absolute; top: .3rem; z-index: 1; pointer-events: none; background: var(--card); color: var(--ink);
  border: 1px solid var(--line); border-radius: .3rem; padding: .25rem .5rem; line-height: 1.35; white-space: nowrap; }
.cross { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
"""

# Values are read back from the drawing itself, so the page does not hold them twice.
HOVER = """
for (const plot of document.querySelectorAll('.plot')) {
  const area = plot.querySelector('.area');
  const [x0, x1] = plot.dataset.x.split(' ').map(Number);
  const scale = plot.dataset.y.split(' ');
  const [y0, y1] = scale.slice(0, 2).map(Number);
  const value = at => {
    const share = 1 - at / 1000;
    const found = scale[2] ? y0 * (y1 / y0) ** share : y0 + (y1 - y0) * share;
    const text = Number((plot.dataset.share ? 100 * found : found).toPrecision(3)).toString();
    return plot.dataset.share ? text + '%' : text;
  };
  const lines = [...plot.querySelectorAll('polyline')].map(line => ({
    name: line.dataset.name,
    points: line.getAttribute('points').split(' ').map(pair => pair.split(',').map(Number)),
  }));
  const marks = [...plot.querySelectorAll('svg line[class]:not(.grid)')].map(line => ({
    x: Number(line.getAttribute('x1')), words: line.textContent,
  }));
  const tip = document.createElement('div'), cross = document.createElement('div');
  tip.className = 'tip'; cross.className = 'cross'; tip.hidden = cross.hidden = true;
  area.append(cross, tip);
  area.addEventListener('pointermove', event => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const rows = [`${plot.dataset.name} ${Math.round(x0 + (x1 - x0) * share).toLocaleString('en')}`];
    for (const { name, points } of lines) {
      const near = points.reduce((a, b) => Math.abs(b[0] - share * 1000) < Math.abs(a[0] - share * 1000) ? b : a);
      rows.push(`${name} ${value(near[1])}`);
    }
    rows.push(...marks.filter(mark => Math.abs(mark.x - share * 1000) < 8).slice(0, 3).map(mark => mark.words));
    tip.replaceChildren(...rows.flatMap((row, at) => at ? [document.createElement('br'), row] : [row]));
    tip.hidden = cross.hidden = false;
    cross.style.left = `${share * 100}%`;
    tip.style.left = share < .5 ? `calc(${share * 100}% + .6rem)` : 'auto';
    tip.style.right = share < .5 ? 'auto' : `calc(${(1 - share) * 100}% + .6rem)`;
  });
  area.addEventListener('pointerleave', () => { tip.hidden = cross.hidden = true; });
}
"""
