// Line charts: the server draws each, this script draws it again when the reader zooms, hides a line or changes an axis. Lines
// carry their values. What the reader chose is in the fragment of the address, which reloads, updates and copies keep.
{
  const VIEW = 1000;
  const X_NAMES = { step: 'step', samples: 'samples seen', time: 'hours' };  // in the order of the columns of tables
  const state = {};
  const finer = {};  // run -> values of a range, from the server
  let plots = [], tables = {}, full = {}, axis = {}, timer = 0;
  const all = selector => [...document.querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const extent = values => values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
  const readState = () => {
    const pairs = new URLSearchParams(location.hash.slice(1));
    const zoom = (pairs.get('z') ?? '').split(',').map(Number);
    state.x = Object.hasOwn(X_NAMES, pairs.get('x')) ? pairs.get('x') : 'step';
    state.lx = pairs.get('lx') === '1' ? '1' : '';
    state.y = ['linear', 'log'].includes(pairs.get('y')) ? pairs.get('y') : '';
    state.s = clamp(Number(pairs.get('s') ?? 2.5) || 0, 0, 20);
    state.z = zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null;
    state.off = new Set(pairs.getAll('off'));
  };
  const change = values => {
    Object.assign(state, values);
    const pairs = new URLSearchParams({ x: state.x, lx: state.lx, y: state.y, s: state.s, z: state.z ?? '' });
    for (const name of state.off) pairs.append('off', name);
    const [section] = location.hash.slice(1).split('&');
    history.replaceState(null, '', `#${section && !section.includes('=') ? `${section}&` : ''}${pairs}`);
    drawAll();
    clearTimeout(timer);
    timer = setTimeout(fetchFiner, 250);
  };
  const position = ({ low, high, log }, value) => log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  const valueAt = ({ low, high, log }, share) => log ? low * (high / low) ** share : low + (high - low) * share;
  const convert = (run, from, to, value) => {  // between columns of a table, whose rows increase in each
    const rows = tables[run]?.rows ?? [];
    if (from === to || !rows.length) return value;
    const before = clamp(rows.findLastIndex(row => row[from] <= value), 0, rows.length - 2);
    const [a, b = a] = rows.slice(before);
    return a[to] + (value - a[from]) / (b[from] - a[from] || 1) * (b[to] - a[to]);
  };
  const fit = (values, log, room, zero) => {  // an axis with all values, and a share of its length as room at both ends
    const [low, high] = extent(zero && !log ? [0, ...values] : values);
    if (low > high) return { low: 1, high: 2 };
    if (log) return { low: low / 1.1, high: high * 1.1, log };
    const space = high - low > 1e-12 * Math.abs(high) ? room * (high - low) : .1 * Math.abs(high) || 1;
    return { low: zero && low === 0 ? 0 : low - space, high: high + space };
  };
  const ticksOf = ({ low, high, log }) => {
    if (log && high / low >= 10) {
      const powers = ticksOf({ low: Math.floor(Math.log10(low)), high: Math.ceil(Math.log10(high)) }).filter(Number.isInteger);
      const digits = powers.length > 4 ? [1] : [1, 2, 5];
      return powers.flatMap(power => digits.map(digit => digit * 10 ** power)).filter(tick => low <= tick && tick <= high);
    }
    const size = 10 ** Math.floor(Math.log10((high - low) / 5));
    const step = size * ([1, 2, 2.5, 5, 10].find(factor => (high - low) / (factor * size) <= 5) ?? 20);
    const first = Math.ceil(low / step - 1e-9);
    const count = clamp(Math.floor(high / step + 1e-9) - first + 1, 0, 20);
    return Array.from({ length: count }, (_, index) => (first + index) * step);
  };
  const format = (value, digits, percent) => {
    const size = Math.abs(value);
    const notation = percent || !size ? 'standard' : size < 1e-3 ? 'scientific' : size >= 1e4 ? 'compact' : 'standard';
    const style = percent ? 'percent' : 'decimal';
    return value.toLocaleString('en', { style, notation, maximumSignificantDigits: digits }).replace('E', 'e').replace('K', 'k');
  };
  const setLabels = (box, side, axis, percent) => {
    const ticks = ticksOf(axis);
    const ratio = extent(ticks.map(Math.abs))[1] / (ticks[1] - ticks[0]);
    const digits = clamp(Math.ceil(Math.log10(ratio)) + 2 || 4, 4, 12);  // neighbours differ
    const place = tick => `${side}:${100 * position(axis, tick)}%`;
    box.innerHTML = ticks.map(tick => `<span style="${place(tick)}">${format(tick, digits, percent)}<\/span>`).join('');
    return ticks;
  };
  const xOf = (run, step) => convert(run, 0, Object.keys(X_NAMES).indexOf(state.x), step);
  const stepsOf = run => state.z.map(x => convert(run, Object.keys(X_NAMES).indexOf(state.x), 0, x));
  const valuesOf = ({ run, curve, part, values }) => {
    const [from, to] = state.z ? stepsOf(run) : [];
    const hasAll = finer[run]?.from <= from && finer[run].to >= to;
    return (hasAll && finer[run].curves[curve]?.[part]) || values;
  };
  const pointsOf = line => {
    const points = valuesOf(line).map(([step, ...ys]) => [xOf(line.run, step), ...ys]).filter(([x]) => x > 0 || !state.lx);
    const [low, high] = state.z ?? [-Infinity, Infinity];
    const xAt = index => points[index]?.[0];  // with the next point beyond each end, so that lines reach the edges
    const shown = points.filter((_, index) => !(xAt(index + 1) < low || xAt(index - 1) > high));
    const half = line.smooth ? Math.floor(shown.length * state.s / 200) : 0;  // like `Curve.smooth`, of what is shown
    const mean = near => near.reduce((sum, [, y]) => sum + y, 0) / near.length;
    return half ? shown.map(([x], index) => [x, mean(shown.slice(Math.max(0, index - half), index + half + 1))]) : shown;
  };
  const draw = plot => {
    const { node, svg, lines } = plot;
    for (const line of lines) line.points = pointsOf(line);
    const values = lines.filter(({ name }) => !state.off.has(name)).flatMap(({ points }) => points.flatMap(([, ...ys]) => ys));
    const positive = values.filter(value => value > 0);
    const isLog = positive.length > 0 && (state.y ? state.y === 'log' : 'log' in node.dataset);
    plot.y = fit(isLog ? positive : values, isLog, .05, node.dataset.zero);
    const heightOf = value => VIEW * (1 - position(plot.y, value));
    const at = ([each, value]) => `${(VIEW * position(axis, each)).toFixed(2)},${heightOf(value).toFixed(2)}`;
    for (const { node: shape, dots, points, name } of lines) {
      const drawn = points.filter(([, ...ys]) => !isLog || ys.every(value => value > 0));
      const back = shape.localName === 'polygon' ? drawn.map(([each, , top]) => at([each, top])).reverse() : [];
      shape.setAttribute('points', [...drawn.map(at), ...back].join(' '));
      dots?.setAttribute('d', drawn.map(point => `M${at(point)}h0`).join(''));
      for (const each of [shape, dots].filter(Boolean)) each.style.display = state.off.has(name) ? 'none' : '';
    }
    setLabels(node.querySelector('.x-labels'), 'left', axis);
    const ticks = setLabels(node.querySelector('.y-labels'), 'bottom', plot.y, node.dataset.percent);
    svg.querySelector('.grid').setAttribute('d', ticks.map(tick => `M0 ${heightOf(tick)}H${VIEW}`).join(''));
    for (const mark of plot.marks) {
      mark.share = position(axis, xOf(Object.keys(tables)[0], mark.step));
      for (const name of ['x1', 'x2']) mark.node.setAttribute(name, Number.isFinite(mark.share) ? VIEW * mark.share : -1);
    }
    node.querySelector('.axis').textContent = X_NAMES[state.x] + (axis.log ? ', logarithmic' : '') + (isLog ? ', logarithmic y axis' : '');
  };
  const drawAll = () => {
    const steps = plots.flatMap(({ lines }) => lines.flatMap(({ run, values }) => values.map(([step]) => xOf(run, step))));
    full = fit(steps.filter(x => x > 0 || !state.lx), state.lx, 0);
    const [low, high] = state.z ?? [full.low, full.high];
    axis = { low, high, log: state.lx && low > 0 };
    plots.forEach(draw);
    for (const bar of all('.chart-controls')) {
      bar.hidden = !plots.length;
      for (const field of bar.querySelectorAll('select, input')) field.value = state[field.name];
      bar.querySelector('[name=reset]').disabled = !state.z;
      bar.querySelector('.value').textContent = `${state.s}% of the range`;
    }
    for (const node of all('[data-line]')) node.setAttribute('aria-pressed', !state.off.has(node.dataset.line));
  };
  const fetchFiner = async () => {
    const reduced = Object.keys(tables).filter(run => tables[run].reduced && tables[run].id && state.z);
    const names = [...new Set(plots.flatMap(plot => plot.lines.map(line => line.curve)).filter(Boolean))];
    for (const [run, [from, to]] of reduced.map(each => [each, stepsOf(each)])) {
      const query = new URLSearchParams([['from', from], ['to', to], ...names.map(name => ['name', name])]);
      const reply = await fetch(`/runs/${encodeURIComponent(tables[run].id)}/curves?${query}`).catch(() => null);
      if (reply?.ok) finer[run] = { from, to, ...await reply.json() };
    }
    if (reduced.length) drawAll();
  };
  const show = (start, left, right) => {  // zoom to shares of an axis, no further than all values
    const [first, last] = [full.low, full.high].map(value => position(start, value));
    const inside = clamp(left, first, last - (right - left));
    const range = [inside, inside + right - left].map(share => valueAt(start, share));
    if (right - left >= (last - first) * (1 - 1e-9)) change({ z: null });
    else if (range[1] - range[0] > 1e-9 * Math.abs(range[1])) change({ z: range });
  };
  const KEYS = { ArrowLeft: [-.1, .9], ArrowRight: [.1, 1.1], '+': [.15, .85], '=': [.15, .85], '-': [-.215, 1.215], Escape: [-1e9, 1e9], 0: [-1e9, 1e9] };
  const showTip = (plot, share, height, from) => {
    const x = valueAt(axis, share);
    const shown = plot.lines.filter(line => line.node.localName === 'polyline' && line.points.length && !state.off.has(line.name));
    const rows = shown.map(({ name, points }) => {
      const [, y] = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return { text: `${name} ${format(y, 5, plot.node.dataset.percent)}`, distance: Math.abs(position(plot.y, y) - (1 - height)) };
    });
    const near = rows.toSorted((a, b) => a.distance - b.distance).slice(0, 12);  // more would not fit
    const texts = [state.x === 'time' ? `${format(x, 5)} hours` : `${X_NAMES[state.x]} ${Math.round(x).toLocaleString('en')}`];
    texts.push(...rows.filter(row => near.includes(row)).map(row => row.text));
    if (rows.length > near.length) texts.push(`and ${rows.length - near.length} more`);
    texts.push(...plot.marks.filter(mark => Math.abs(mark.share - share) < .008).slice(0, 3).map(mark => mark.node.textContent));
    plot.tip.innerText = texts.join('\n');
    plot.tip.classList.toggle('before', share > .5);
    plot.cross.style.left = `${100 * Math.min(share, from)}%`;
    plot.cross.style.width = `${100 * Math.abs(share - from)}%`;
    plot.cross.hidden = false;
  };
  const attachPlot = node => {
    const [area, svg, cross, tip] = ['.area', 'svg', '.cross', '.tip'].map(name => node.querySelector(name));
    const lines = [...svg.querySelectorAll('polyline, polygon')].map(shape => ({
      ...shape.dataset,
      values: shape.dataset.values.split(' ').map(row => row.split(',').map(Number)),
      node: shape,
      dots: shape.nextElementSibling?.closest('.dots'),
    }));
    const marks = [...svg.querySelectorAll('.mark')].map(mark => ({ node: mark, step: Number(mark.dataset.x) }));
    const plot = { node, svg, tip, cross, lines, marks };
    const pointers = new Map();
    const shares = ({ offsetX, offsetY }) => [clamp(offsetX / area.clientWidth, 0, 1), clamp(offsetY / area.clientHeight, 0, 1)];
    const begin = () => pointers.forEach(pointer => Object.assign(pointer, { from: pointer.at, axis }));
    const end = ({ type, pointerId }) => {
      const { from, at, pans } = pointers.get(pointerId) ?? { pans: true };
      pointers.delete(pointerId);
      if (pointers.size) return begin();
      cross.hidden = true;
      if (type === 'pointerup' && !pans && Math.abs(at - from) > .01) show(axis, ...extent([at, from]));
    };
    const on = (kind, act) => area.addEventListener(kind, act, { passive: false });
    on('pointerdown', event => {
      if (event.button) return;
      area.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, { at: shares(event)[0], pans: event.shiftKey || event.pointerType === 'touch' });
      begin();
    });
    on('pointermove', event => {
      const [share, height] = shares(event);
      const pointer = pointers.get(event.pointerId);
      if (pointer) pointer.at = share;
      const [a, b] = pointers.values();
      if (pointer?.pans && (b || state.z)) {  // what was under the fingers stays under them
        const factor = b ? (b.from - a.from) / (b.at - a.at) : 1;
        const left = a.from - a.at * factor;
        if (factor > 0 && Number.isFinite(factor)) show(pointer.axis, left, left + factor);
        return;
      }
      showTip(plot, share, height, pointer && !pointer.pans ? pointer.from : share);
    });
    on('pointerup', end);
    on('pointercancel', end);
    on('pointerleave', () => { cross.hidden = true; });
    on('dblclick', () => change({ z: null }));
    on('wheel', event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const [share] = shares(event);
      const factor = 1.002 ** clamp(event.deltaY, -300, 300);
      show(axis, share - share * factor, share + (1 - share) * factor);
    });
    on('keydown', event => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
      event.preventDefault();
      show(axis, ...KEYS[event.key]);
    });
    return plot;
  };
  const attachAll = () => {
    tables = JSON.parse(document.querySelector('.x-tables')?.dataset.tables ?? '{}');
    plots = all('.plot').map(node => plots.find(plot => plot.node === node) ?? attachPlot(node));
    drawAll();
    fetchFiner();
  };
  addEventListener('click', ({ target, detail }) => {
    if (target.matches('.chart-controls [name=reset]')) change({ z: null });
    const name = target.closest('[data-line]')?.dataset.line;
    if (name === undefined) return;
    const others = new Set(plots.flatMap(plot => plot.lines.map(line => line.name)).filter(each => each !== name));
    const alone = others.isSubsetOf(state.off) ? new Set() : others;
    change({ off: detail === 2 ? alone : state.off.symmetricDifference(new Set([name])) });
  });
  addEventListener('input', ({ target }) => {
    if (!target.closest('.chart-controls')) return;
    change({ [target.name]: target.value, z: ['x', 'lx'].includes(target.name) ? null : state.z });
  });
  addEventListener('hashchange', () => {
    if (location.hash.includes('=')) readState();  // otherwise a link to a section
    change({});
  });
  addEventListener('updated', attachAll);
  readState();
  attachAll();
  document.getElementById(location.hash.slice(1).split('&')[0])?.scrollIntoView();
}
