// Line charts: zoom, axes, smoothing, hidden lines, tooltips. The server draws every chart; this script draws it again
// when the reader changes something. Lines carry their values, so none is read back from a position. What the reader
// chose is in the fragment of the address: reloads, self-updates and copies of the address keep it.
{
  const VIEW = 1000, MOST_ROWS = 12, SMOOTHING = 2.5, MOST_DOTS = 40, SHORTEST_DRAG = .01;
  const COLUMNS = { step: 0, samples: 1, time: 2 }, X_NAMES = { step: 'step', samples: 'samples seen', time: 'hours' };
  const SUFFIXES = [[1e9, 1e9, 'G'], [1e6, 1e6, 'M'], [1e4, 1e3, 'k']];
  const state = {};
  let plots = [], tables = {}, focused = '', frame = 0, timer = 0;

  const readState = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const smoothing = Number(given.get('s') ?? SMOOTHING), zoom = (given.get('z') ?? '').split(',').map(Number);
    Object.assign(state, {
      x: Object.hasOwn(COLUMNS, given.get('x')) ? given.get('x') : 'step',
      lx: given.get('lx') === '1',
      y: ['linear', 'log'].includes(given.get('y')) ? given.get('y') : '',
      s: smoothing >= 0 && smoothing <= 20 ? smoothing : SMOOTHING,
      z: zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null,
      off: new Set(given.getAll('off')),
    });
  };
  const writeState = () => {
    const all = [['x', state.x, 'step'], ['lx', Number(state.lx), 0], ['y', state.y, ''], ['s', state.s, SMOOTHING],
      ['z', state.z?.map(value => Number(value.toPrecision(10))).join(), undefined]];
    const changed = new URLSearchParams(all.filter(([, value, usual]) => value !== usual).map(([key, value]) => [key, value]));
    for (const name of state.off) changed.append('off', name);
    const section = location.hash.slice(1).split('&')[0];
    const kept = section && !section.includes('=') ? [section] : [];
    const hash = [...kept, ...(changed.size ? [changed] : [])].join('&');
    history.replaceState(null, '', location.pathname + location.search + (hash && `#${hash}`));
  };

  // --- numbers ---
  const position = ({ low, high, log }, value) => log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  const valueAt = ({ low, high, log }, share) => log ? low * (high / low) ** share : low + (high - low) * share;
  const interpolate = (rows, from, to, value) => {  // the rows increase in every column
    if (from === to || !rows.length) return value;
    let low = 0, high = rows.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (rows[middle][from] <= value) low = middle; else high = middle;
    }
    const [a, b] = [rows[low], rows[high]], span = b[from] - a[from];
    return span ? a[to] + (value - a[from]) / span * (b[to] - a[to]) : a[to];
  };
  const smooth = points => {  // like `Curve.smooth`: a moving mean over a share of what is shown
    const half = Math.floor(points.length * state.s / 200);
    return points.map(([x], index) => {
      const near = points.slice(Math.max(0, index - half), index + half + 1);
      return [x, near.reduce((sum, point) => sum + point[1], 0) / near.length];
    });
  };
  const fit = (values, log, zero) => {
    let low = Infinity, high = -Infinity;
    for (const value of zero && !log ? [0, ...values] : values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (log) return { low: low / 1.1, high: high * 1.1, log };
    const narrow = high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high));
    const room = narrow ? .1 * Math.abs(high) || 1 : .05 * (high - low);
    return { low: zero && low === 0 ? 0 : low - room, high: high + room, log };
  };
  const ticksOf = ({ low, high, log }, most = 5) => {
    if (log && high / low >= 10) {
      const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), digits = last - first <= 2 ? [1, 2, 5] : [1];
      const powers = Array.from({ length: last - first + 1 }, (_, index) => first + index);
      const every = digits.length > 1 ? 1 : Math.ceil((last - first) / most);
      return powers.filter((_, index) => index % every === 0).flatMap(power => digits.map(digit => digit * 10 ** power))
        .filter(tick => low <= tick && tick <= high);
    }
    const size = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = size * ([1, 2, 2.5, 5, 10].find(factor => (high - low) / (factor * size) <= most) ?? 20);
    const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: Math.max(0, Math.min(count, 20)) }, (_, index) => (first + index) * step);
  };
  const format = (value, digits, percent) => {
    if (percent) return `${Number((100 * value).toPrecision(digits))}%`;
    const size = Math.abs(value);
    const [, divisor, suffix] = SUFFIXES.find(([limit]) => size >= limit) ?? [0, 1, ''];
    const number = Number((value / divisor).toPrecision(digits));
    return (size && size < 1e-3 ? number.toExponential() : number.toLocaleString('en', { maximumSignificantDigits: digits })) + suffix;
  };
  const labelsOf = (ticks, percent) => {
    for (let digits = 4; ; digits++) {
      const labels = ticks.map(tick => format(tick, digits, percent));
      if (new Set(labels).size === ticks.length || digits > 12) return labels;
    }
  };

  // --- drawing ---
  const readLine = node => ({
    ...node.dataset, node,
    values: node.dataset.values.split(' ').map(row => row.split(',').map(Number)),
    dots: node.nextElementSibling?.matches('path.dots') ? node.nextElementSibling : null,
  });
  const pointsOf = (line, range) => {
    const table = tables[line.run] ?? { rows: [] }, column = COLUMNS[state.x];
    const fine = range && isFine(table, range) ? table.fine.curves[line.curve]?.[line.part] : null;
    let points = (fine ?? line.values).map(([x, ...ys]) => [interpolate(table.rows, 0, column, x), ...ys]);
    if (range) {  // with the next point beyond each end, so that lines reach the edges
      const first = points.findIndex(point => point[0] >= range[0]), last = points.findLastIndex(point => point[0] <= range[1]);
      points = first < 0 || last < 0 ? [] : points.slice(Math.max(0, first - 1), last + 2);
    }
    return (line.smooth ? smooth(points) : points).filter(point => !state.lx || point[0] > 0);
  };
  const xRange = plot => {
    const xs = plot.lines.flatMap(line => pointsOf(line).map(point => point[0]));
    const [only, ...others] = Object.values(tables);
    if (only && !others.length) {
      const ends = plot.node.dataset.x.split(' ').map(x => interpolate(only.rows, 0, COLUMNS[state.x], Number(x)));
      xs.push(...ends.filter(x => !state.lx || x > 0));
    }
    const low = xs.reduce((a, b) => Math.min(a, b), Infinity), high = xs.reduce((a, b) => Math.max(a, b), -Infinity);
    return low < high ? [low, high] : Number.isFinite(low) ? [low * (state.lx ? .9 : 1) - !state.lx, high * (state.lx ? 1.1 : 1) + !state.lx] : [1, 2];
  };
  const setLabels = (box, side, axis, ticks, percent) => {
    const labels = labelsOf(ticks, percent);
    box.replaceChildren(...ticks.map((tick, index) => {
      const label = document.createElement('span');
      label.textContent = labels[index];
      label.style[side] = `${100 * position(axis, tick)}%`;
      return label;
    }));
  };
  const draw = plot => {
    const { node, svg } = plot, { percent, zero } = node.dataset;
    plot.full = xRange(plot);
    const [low, high] = state.z ?? plot.full, x = { low, high, log: state.lx && low > 0 };
    for (const line of plot.lines) line.points = pointsOf(line, state.z);
    const shown = plot.lines.filter(line => !state.off.has(line.name));
    const values = shown.flatMap(line => line.points.filter(point => point[0] >= low && point[0] <= high).flatMap(point => point.slice(1)));
    const positive = values.filter(value => value > 0);
    const log = (state.y ? state.y === 'log' : 'log' in node.dataset) && positive.length > 0;
    const y = fit((log ? positive : values).length ? (log ? positive : values) : [0, 1], log, zero);
    const at = (each, value) => `${(VIEW * position(x, each)).toFixed(2)},${(VIEW * (1 - position(y, value))).toFixed(2)}`;
    for (const line of plot.lines) {
      const drawn = line.points.filter(point => !log || point.slice(1).every(value => value > 0));
      const forward = drawn.map(point => at(point[0], point[1])), back = drawn.map(point => at(point[0], point[2])).reverse();
      line.node.setAttribute('points', [...forward, ...(line.node.localName === 'polygon' ? back : [])].join(' '));
      line.dots?.setAttribute('d', drawn.length <= MOST_DOTS ? forward.map(each => `M${each}h0`).join('') : '');
      for (const each of [line.node, line.dots]) if (each) each.style.display = state.off.has(line.name) ? 'none' : '';
    }
    const yTicks = ticksOf(y), xTicks = ticksOf(x);
    svg.querySelectorAll('.grid').forEach(each => each.remove());
    svg.prepend(...svg.querySelectorAll('title, desc'), ...yTicks.map(tick => {
      const grid = document.createElementNS(svg.namespaceURI, 'line'), height = VIEW * (1 - position(y, tick));
      for (const [name, value] of Object.entries({ class: 'grid', x1: 0, x2: VIEW, y1: height, y2: height })) grid.setAttribute(name, value);
      return grid;
    }));
    plot.marks = [...svg.querySelectorAll('.mark')].map(mark => {
      const rows = Object.values(tables)[0]?.rows ?? [];
      const share = position(x, interpolate(rows, 0, COLUMNS[state.x], Number(mark.dataset.x)));
      for (const name of ['x1', 'x2']) mark.setAttribute(name, Number.isFinite(share) ? VIEW * share : -1);
      return { share, label: mark.textContent };
    });
    setLabels(node.querySelector('.y-labels'), 'bottom', y, yTicks, percent);
    setLabels(node.querySelector('.x-labels'), 'left', x, xTicks);
    node.querySelector('.axis').textContent = X_NAMES[state.x] + (x.log ? ', logarithmic' : '') + (log ? ', logarithmic y axis' : '');
    Object.assign(plot, { x, y });
  };
  const drawAll = () => {
    frame = 0;
    plots.forEach(draw);
    showState();
  };
  const change = values => {
    Object.assign(state, values);
    writeState();
    frame ||= requestAnimationFrame(drawAll);
    clearTimeout(timer);
    timer = setTimeout(fetchFine, 250);
  };

  // --- finer values of a long run, from the server ---
  const stepsOf = (table, range) => range.map(x => interpolate(table.rows, COLUMNS[state.x], 0, x));
  const isFine = (table, range) => {
    const [from, to] = stepsOf(table, range);
    return table.fine && table.fine.from <= from && table.fine.to >= to;
  };
  const fetchFine = async () => {
    const range = state.z;
    if (!range || !document.querySelector('main[data-live]')) return;
    const names = new Set(plots.flatMap(plot => plot.lines.map(line => line.curve)).filter(Boolean));
    for (const [run, table] of Object.entries(tables)) {
      const [from, to] = stepsOf(table, range);
      if (!table.reduced || (isFine(table, range) && table.fine.to - table.fine.from < 2 * (to - from))) continue;
      const query = new URLSearchParams([['from', from], ['to', to], ...[...names].map(name => ['name', name])]);
      const reply = await fetch(`/runs/${encodeURIComponent(run)}/curves?${query}`).catch(() => null);
      const curves = reply?.ok ? (await reply.json()).curves : {};
      if (Object.keys(curves).length) table.fine = { from, to, curves };
    }
    frame ||= requestAnimationFrame(drawAll);
  };

  // --- what the reader does ---
  const view = (plot, x, left, right) => {  // zoom to shares of an axis, no further than all values
    const [first, last] = plot.full.map(value => position(x, value)), width = right - left;
    if (!(width < (last - first) * (1 - 1e-9))) return change({ z: null });
    const start = Math.min(Math.max(left, first), last - width), range = [valueAt(x, start), valueAt(x, start + width)];
    if (range[1] - range[0] > 1e-9 * Math.abs(range[1])) change({ z: range });
  };
  const zoom = (plot, center, factor) => view(plot, plot.x, center - center * factor, center + (1 - center) * factor);
  const KEYS = {
    ArrowLeft: plot => view(plot, plot.x, -.1, .9), ArrowRight: plot => view(plot, plot.x, .1, 1.1),
    '+': plot => zoom(plot, .5, .7), '=': plot => zoom(plot, .5, .7), '-': plot => zoom(plot, .5, 1 / .7),
    0: () => change({ z: null }), Escape: () => change({ z: null }),
  };
  const showTip = (plot, share, height) => {
    const { tip, cross } = plot, x = valueAt(plot.x, share), y = valueAt(plot.y, 1 - height);
    const rows = plot.lines.filter(line => line.node.localName === 'polyline' && line.points.length && !state.off.has(line.name)).map(line => {
      const nearest = line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return { text: `${line.name} ${format(nearest[1], 5, plot.node.dataset.percent)}`, distance: Math.abs(position(plot.y, nearest[1]) - position(plot.y, y)) };
    });
    const far = [...rows].sort((a, b) => a.distance - b.distance).slice(MOST_ROWS);
    const title = state.x === 'time' ? `${format(x, 5)} hours` : `${X_NAMES[state.x]} ${Math.round(x).toLocaleString('en')}`;
    const marks = plot.marks.filter(mark => Math.abs(mark.share - share) < .008).slice(0, 3).map(mark => mark.label);
    const texts = [title, ...rows.filter(row => !far.includes(row)).map(row => row.text), ...(far.length ? [`and ${far.length} more`] : []), ...marks];
    tip.replaceChildren(...texts.flatMap((text, index) => index ? [document.createElement('br'), text] : [text]));
    tip.hidden = cross.hidden = false;
    cross.style.left = `${share * 100}%`;
    tip.style.left = share < .5 ? `calc(${share * 100}% + .6rem)` : 'auto';
    tip.style.right = share < .5 ? 'auto' : `calc(${(1 - share) * 100}% + .6rem)`;
  };
  const attachPlot = node => {
    const area = node.querySelector('.area'), svg = node.querySelector('svg'), pointers = new Map();
    const [tip, cross, box] = ['tip', 'cross', 'selected'].map(name => Object.assign(document.createElement('div'), { className: name, hidden: true }));
    const plot = { node, area, svg, tip, cross, lines: [...svg.querySelectorAll('polyline, polygon')].map(readLine) };
    area.append(box, cross, tip);
    Object.assign(area, { tabIndex: 0, ariaLabel: `${node.dataset.title}: chart; arrow keys pan, + and - zoom, 0 resets` });
    area.setAttribute('role', 'group');
    const shares = event => {
      const rectangle = area.getBoundingClientRect();
      return [(event.clientX - rectangle.left) / rectangle.width, (event.clientY - rectangle.top) / rectangle.height].map(share => Math.min(1, Math.max(0, share)));
    };
    const hide = () => { tip.hidden = cross.hidden = box.hidden = true; };
    const begin = () => { for (const pointer of pointers.values()) pointer.from = pointer.at; plot.start = plot.x; };
    const move = () => {  // what was under the fingers stays under them
      const [a, b] = [...pointers.values()];
      const factor = b ? (b.from - a.from) / (b.at - a.at) : 1, left = a.from - a.at * factor;
      if (factor > 0 && Number.isFinite(factor)) view(plot, plot.start, left, left + factor);
    };
    area.addEventListener('pointerdown', event => {
      if (event.button) return;
      area.setPointerCapture(event.pointerId);
      area.classList.add('dragged');  // `live.js` does not replace it meanwhile
      pointers.set(event.pointerId, { at: shares(event)[0], pans: event.shiftKey || event.pointerType === 'touch' });
      begin();
    });
    area.addEventListener('pointermove', event => {
      const [share, height] = shares(event), pointer = pointers.get(event.pointerId);
      if (pointer) pointer.at = share;
      if (pointer?.pans && (pointers.size > 1 || state.z)) return move();
      box.hidden = !pointer || pointer.pans;
      if (pointer) Object.assign(box.style, { left: `${100 * Math.min(share, pointer.from)}%`, width: `${100 * Math.abs(share - pointer.from)}%` });
      showTip(plot, share, height);
    });
    for (const kind of ['pointerup', 'pointercancel']) area.addEventListener(kind, event => {
      const pointer = pointers.get(event.pointerId), ends = pointer ? [pointer.from, pointer.at].sort((a, b) => a - b) : [0, 0];
      pointers.delete(event.pointerId);
      if (pointers.size) return begin();
      area.classList.remove('dragged');
      hide();
      if (kind === 'pointerup' && pointer && !pointer.pans && ends[1] - ends[0] > SHORTEST_DRAG) view(plot, plot.x, ...ends);
    });
    area.addEventListener('pointerleave', hide);
    area.addEventListener('dblclick', () => change({ z: null }));
    area.addEventListener('focus', () => { focused = node.dataset.title; });
    area.addEventListener('blur', () => { if (area.isConnected) focused = ''; });
    area.addEventListener('wheel', event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(plot, shares(event)[0], 1.002 ** Math.max(-300, Math.min(300, event.deltaY)));
    }, { passive: false });
    area.addEventListener('keydown', event => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
      event.preventDefault();
      KEYS[event.key](plot);
    });
    return plot;
  };
  const attachName = node => {
    const name = node.dataset.line;
    const toggle = () => change({ off: new Set(state.off.has(name) ? [...state.off].filter(each => each !== name) : [...state.off, name]) });
    Object.assign(node, { tabIndex: 0, title: 'Hide or show; double click: only this one' });
    node.setAttribute('role', 'button');
    node.addEventListener('click', toggle);
    node.addEventListener('keydown', event => { if (['Enter', ' '].includes(event.key)) { event.preventDefault(); toggle(); } });
    node.addEventListener('dblclick', () => {
      const names = plots.flatMap(plot => plot.lines.map(line => line.name)), others = names.filter(each => each !== name);
      change({ off: new Set(others.every(each => state.off.has(each)) ? [] : others) });
    });
  };
  const showState = () => {
    for (const bar of document.querySelectorAll('.chart-controls')) {
      bar.hidden = !plots.length;
      for (const field of ['x', 'y', 's']) bar.querySelector(`[name=${field}]`).value = state[field];
      bar.querySelector('[name=lx]').checked = state.lx;
      bar.querySelector('[name=reset]').disabled = !state.z;
      bar.querySelector('output').textContent = `${state.s}% of the range`;
    }
    for (const node of document.querySelectorAll('[data-line]')) node.setAttribute('aria-pressed', !state.off.has(node.dataset.line));
  };
  const attachControls = bar => bar.addEventListener('input', () => {
    const [x, y, smoothing] = ['x', 'y', 's'].map(name => bar.querySelector(`[name=${name}]`).value), lx = bar.querySelector('[name=lx]').checked;
    change({ x, y, lx, s: Number(smoothing), z: x === state.x && lx === state.lx ? state.z : null });
  });
  const attachAll = () => {
    const read = JSON.parse(document.querySelector('.x-tables')?.dataset.tables ?? '{}');
    for (const [run, table] of Object.entries(read)) {  // finer values stay, unless the run may have added to them
      const old = tables[run];
      if (old?.fine && old.fine.to < old.rows.at(-1)?.[0]) table.fine = old.fine;
    }
    tables = read;
    const known = new Map(plots.map(plot => [plot.node, plot]));
    plots = [...document.querySelectorAll('.plot')].map(node => known.get(node) ?? attachPlot(node));
    document.querySelectorAll('[data-line]:not([role])').forEach(attachName);
    for (const bar of document.querySelectorAll('.chart-controls:not([data-on])')) {
      bar.dataset.on = '1';
      attachControls(bar);
      bar.querySelector('[name=reset]').addEventListener('click', () => change({ z: null }));
    }
    drawAll();
    if (state.z) fetchFine();
    if (focused && document.activeElement === document.body) plots.find(plot => plot.node.dataset.title === focused)?.area.focus({ preventScroll: true });
  };
  addEventListener('hashchange', () => {
    if (location.hash.includes('=') || !location.hash) { readState(); drawAll(); fetchFine(); } else writeState();
  });
  addEventListener('updated', attachAll);
  readState();
  attachAll();
  document.getElementById(location.hash.slice(1).split('&')[0])?.scrollIntoView();
}
