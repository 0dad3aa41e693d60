// Show the values under the pointer. They are read back from the drawing, so the page does not hold them twice.
const attachTooltip = plot => {
  const VIEW = 1000;
  const area = plot.querySelector('.area');
  const [xLow, xHigh] = plot.dataset.x.split(' ').map(Number);
  const [yLow, yHigh] = plot.dataset.y.split(' ').map(Number);
  const { log, percent, name: xName } = plot.dataset;
  const valueAt = y => {
    const share = 1 - y / VIEW;
    const value = log ? yLow * (yHigh / yLow) ** share : yLow + (yHigh - yLow) * share;
    return Number((percent ? 100 * value : value).toPrecision(3)) + (percent ? '%' : '');
  };
  const lines = [...plot.querySelectorAll('polyline')].map(line => ({
    name: line.dataset.name,
    points: line.getAttribute('points').split(' ').map(pair => pair.split(',').map(Number)),
  }));
  const marks = [...plot.querySelectorAll('line.mark')].map(line => ({
    x: Number(line.getAttribute('x1')), label: line.textContent,
  }));
  const tip = document.createElement('div'), cross = document.createElement('div');
  tip.className = 'tip';
  cross.className = 'cross';
  tip.hidden = cross.hidden = true;
  area.append(cross, tip);
  area.addEventListener('pointermove', event => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const x = share * VIEW;
    const rows = [`${xName} ${Math.round(xLow + (xHigh - xLow) * share).toLocaleString('en')}`];
    for (const { name, points } of lines) {
      const nearest = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      rows.push(`${name} ${valueAt(nearest[1])}`);
    }
    rows.push(...marks.filter(mark => Math.abs(mark.x - x) < 8).slice(0, 3).map(mark => mark.label));
    tip.replaceChildren(...rows.flatMap((row, index) => index ? [document.createElement('br'), row] : [row]));
    tip.hidden = cross.hidden = false;
    cross.style.left = `${share * 100}%`;
    tip.style.left = share < .5 ? `calc(${share * 100}% + .6rem)` : 'auto';
    tip.style.right = share < .5 ? 'auto' : `calc(${(1 - share) * 100}% + .6rem)`;
  });
  area.addEventListener('pointerleave', () => { tip.hidden = cross.hidden = true; });
};
const attachTooltips = () => document.querySelectorAll('.plot:not(:has(.tip))').forEach(attachTooltip);
addEventListener('updated', attachTooltips);
attachTooltips();
