// Line charts: zoom, axes, smoothing, hidden lines, tooltips. The server draws each chart; this script draws it again when
// the reader changes something. Lines carry their values, so none is read back from a position. What the reader chose is
// in the fragment of the address: reloads, self-updates and copies of the address keep it.
{
  const VIEW = 1000, MOST_ROWS = 12, MOST_DOTS = 40, SMOOTHING = 2.5, COLUMNS = { step: 0, samples: 1, time: 2 };
  const X_NAMES = { step: 'step', samples: 'samples seen', time: 'hours' }, SUFFIXES = [[1e9, 1e9, 'G'], [1e6, 1e6, 'M'], [1e4, 1e3, 'k']];
  const state = {};
  let plots = [], tables = {}, focused = '', frame = 0, timer = 0;
  const all = selector => [...document.querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  const readState = () => {
    const given = new URLSearchParams(location.hash.slice(1)), zoom = (given.get('z') ?? '').split(',').map(Number);
    const smoothing = Number(given.get('s') ?? SMOOTHING);
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
    const pairs = [['x', state.x, 'step'], ['lx', +state.lx, 0], ['y', state.y, ''], ['s', state.s, SMOOTHING],
      ['z', state.z?.map(value => Number(value.toPrecision(10))).join(), undefined]].filter(([, value, usual]) => value !== usual);
    const chosen = new URLSearchParams([...pairs.map(pair => pair.slice(0, 2)), ...[...state.off].map(name => ['off', name])]);
    const section = location.hash.slice(1).split('&')[0];
    const hash = [section.includes('=') ? '' : section, `${chosen}`].filter(Boolean).join('&');
    history.replaceState(null, '', location.pathname + location.search + (hash && `#${hash}`));
  };
  const change = values => {
    Object.assign(state, values);
    writeState();
    frame ||= requestAnimationFrame(drawAll);
    clearTimeout(timer);
    timer = setTimeout(fetchFine, 250);
  };

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
  const fit = (values, log, zero) => {
    const usable = log ? values.filter(value => value > 0) : zero ? [0, ...values] : values;
    const low = usable.reduce((a, b) => Math.min(a, b), Infinity), high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!usable.length) return { low: 0, high: 1 };
    if (log) return { low: low / 1.1, high: high * 1.1, log };
    const isNarrow = high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high));
    const room = isNarrow ? .1 * Math.abs(high) || 1 : .05 * (high - low);
    return { low: zero && low === 0 ? 0 : low - room, high: high + room };
  };
  const ticksOf = ({ low, high, log }) => {
    if (log && high / low >= 10) {
      const first = Math.floor(Math.log10(low)), count = Math.ceil(Math.log10(high)) - first, every = Math.max(1, Math.ceil(count / 5));
      const powers = Array.from({ length: count + 1 }, (_, index) => 10 ** (first + index)).filter((_, index) => index % every === 0);
      return powers.flatMap(power => (count <= 2 ? [1, 2, 5] : [1]).map(digit => digit * power)).filter(tick => low <= tick && tick <= high);
    }
    const size = 10 ** Math.floor(Math.log10((high - low) / 5));
    const step = size * ([1, 2, 2.5, 5, 10].find(factor => (high - low) / (factor * size) <= 5) ?? 20), first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: clamp(Math.floor(high / step + 1e-9) - first + 1, 0, 20) }, (_, index) => (first + index) * step);
  };
  const format = (value, digits, percent) => {
    if (percent) return `${Number((100 * value).toPrecision(digits))}%`;
    const size = Math.abs(value), [, divisor, suffix] = SUFFIXES.find(([limit]) => size >= limit) ?? [0, 1, ''];
    const number = Number((value / divisor).toPrecision(digits));
    return (size && size < 1e-3 ? number.toExponential() : number.toLocaleString('en', { maximumSignificantDigits: digits })) + suffix;
  };
  const setLabels = (box, side, axis, percent) => {
    const ticks = ticksOf(axis), write = digits => ticks.map(tick => format(tick, digits, percent));
    const digits = [4, 6, 8, 10].find(each => new Set(write(each)).size === ticks.length) ?? 12;
    box.replaceChildren(...write(digits).map((text, index) => {
      const label = Object.assign(document.createElement('span'), { textContent: text });
      label.style[side] = `${100 * position(axis, ticks[index])}%`;
      return label;
    }));
    return ticks;
  };

  const pointsOf = (line, range) => {
    const table = tables[line.run] ?? { rows: [] }, column = COLUMNS[state.x];
    const fine = range && isFine(table, range) ? table.fine.curves[line.curve]?.[line.part] : null;
    let points = (fine ?? line.values).map(([x, ...ys]) => [interpolate(table.rows, 0, column, x), ...ys]);
    if (range) {  // with the next point beyond each end, so that lines reach the edges
      const first = points.findIndex(point => point[0] >= range[0]), last = points.findLastIndex(point => point[0] <= range[1]);
      points = first < 0 || last < 0 ? [] : points.slice(Math.max(0, first - 1), last + 2);
    }
    const half = line.smooth ? Math.floor(points.length * state.s / 200) : 0;  // like `Curve.smooth`, of what is shown
    const mean = near => near.reduce((sum, point) => sum + point[1], 0) / near.length;
    const smoothed = half ? points.map(([x], index) => [x, mean(points.slice(Math.max(0, index - half), index + half + 1))]) : points;
    return state.lx ? smoothed.filter(point => point[0] > 0) : smoothed;
  };
  const fullRange = plot => {
    const ends = Object.values(tables).flatMap(({ rows }) => rows.length ? [rows[0], rows.at(-1)].map(row => row[COLUMNS[state.x]]) : []);
    const xs = [...ends, ...plot.lines.flatMap(line => pointsOf(line).map(point => point[0]))].filter(x => x > 0 || !state.lx);
    const low = xs.reduce((a, b) => Math.min(a, b), Infinity), high = xs.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low < high) return [low, high];
    return !xs.length ? [1, 2] : state.lx ? [low / 1.1, low * 1.1] : [low - 1, low + 1];
  };
  const draw = plot => {
    const { node, svg, lines } = plot, { percent, zero } = node.dataset;
    plot.full = fullRange(plot);
    const [low, high] = state.z ?? plot.full, x = { low, high, log: state.lx && low > 0 };
    for (const line of lines) line.points = pointsOf(line, state.z);
    const inside = lines.filter(line => !state.off.has(line.name)).flatMap(line => line.points.filter(([each]) => each >= low && each <= high));
    const values = inside.flatMap(point => point.slice(1)), wantsLog = state.y ? state.y === 'log' : 'log' in node.dataset;
    const y = fit(values, wantsLog && values.some(value => value > 0), zero);
    const at = (each, value) => `${(VIEW * position(x, each)).toFixed(2)},${(VIEW * (1 - position(y, value))).toFixed(2)}`;
    for (const { node: shape, dots, points, name } of lines) {
      const drawn = points.filter(point => !y.log || point.slice(1).every(value => value > 0)), corners = drawn.map(point => at(point[0], point[1]));
      const back = shape.localName === 'polygon' ? drawn.map(point => at(point[0], point[2])).reverse() : [];
      shape.setAttribute('points', [...corners, ...back].join(' '));
      dots?.setAttribute('d', drawn.length <= MOST_DOTS ? corners.map(corner => `M${corner}h0`).join('') : '');
      for (const each of [shape, dots]) if (each) each.style.display = state.off.has(name) ? 'none' : '';
    }
    setLabels(node.querySelector('.x-labels'), 'left', x);
    svg.querySelectorAll('.grid').forEach(each => each.remove());
    svg.querySelector('desc').after(...setLabels(node.querySelector('.y-labels'), 'bottom', y, percent).map(tick => {
      const grid = document.createElementNS(svg.namespaceURI, 'line'), height = VIEW * (1 - position(y, tick));
      for (const [name, value] of Object.entries({ class: 'grid', x1: 0, x2: VIEW, y1: height, y2: height })) grid.setAttribute(name, value);
      return grid;
    }));
    plot.marks = [...svg.querySelectorAll('.mark')].map(mark => {
      const share = position(x, interpolate(Object.values(tables)[0]?.rows ?? [], 0, COLUMNS[state.x], Number(mark.dataset.x)));
      for (const name of ['x1', 'x2']) mark.setAttribute(name, Number.isFinite(share) ? VIEW * share : -1);
      return { share, label: mark.textContent };
    });
    node.querySelector('.axis').textContent = X_NAMES[state.x] + (x.log ? ', logarithmic' : '') + (y.log ? ', logarithmic y axis' : '');
    Object.assign(plot, { x, y });
  };
  const drawAll = () => {
    frame = 0;
    plots.forEach(draw);
    for (const bar of all('.chart-controls')) {
      bar.hidden = !plots.length;
      for (const field of ['x', 'y', 's']) bar.querySelector(`[name=${field}]`).value = state[field];
      bar.querySelector('[name=lx]').checked = state.lx;
      bar.querySelector('[name=reset]').disabled = !state.z;
      bar.querySelector('.value').textContent = `${state.s}% of the range`;
    }
    for (const node of all('[data-line]')) node.setAttribute('aria-pressed', !state.off.has(node.dataset.line));
  };

  // Finer values of a long run, from the server.
  const stepsOf = (table, range) => range.map(x => interpolate(table.rows, COLUMNS[state.x], 0, x));
  const isFine = (table, range) => {
    const [from, to] = stepsOf(table, range);
    return table.fine && table.fine.from <= from && table.fine.to >= to;
  };
  const fetchFine = async () => {
    const range = state.z, names = new Set(plots.flatMap(plot => plot.lines.map(line => line.curve)).filter(Boolean));
    if (!range || !document.querySelector('main[data-live]')) return;
    for (const table of Object.values(tables).filter(each => each.reduced)) {
      const [from, to] = stepsOf(table, range);
      if (isFine(table, range) && table.fine.to - table.fine.from < 2 * (to - from)) continue;
      const query = new URLSearchParams([['from', from], ['to', to], ...[...names].map(name => ['name', name])]);
      const reply = await fetch(`/runs/${encodeURIComponent(table.id)}/curves?${query}`).catch(() => null);
      const curves = reply?.ok ? (await reply.json()).curves : {};
      if (Object.keys(curves).length) table.fine = { from, to, curves };
    }
    frame ||= requestAnimationFrame(drawAll);
  };

  const view = (plot, x, left, right) => {  // zoom to shares of an axis, no further than all values
    const [first, last] = plot.full.map(value => position(x, value)), width = right - left, start = clamp(left, first, last - width);
    if (!(width < (last - first) * (1 - 1e-9))) return change({ z: null });
    const range = [valueAt(x, start), valueAt(x, start + width)];
    if (range[1] - range[0] > 1e-9 * Math.abs(range[1])) change({ z: range });
  };
  const zoom = (plot, center, factor) => view(plot, plot.x, center - center * factor, center + (1 - center) * factor);
  const reset = () => change({ z: null });
  const KEYS = { ArrowLeft: plot => view(plot, plot.x, -.1, .9), ArrowRight: plot => view(plot, plot.x, .1, 1.1), '+': plot => zoom(plot, .5, .7),
    '=': plot => zoom(plot, .5, .7), '-': plot => zoom(plot, .5, 1 / .7), 0: reset, Escape: reset };
  const showTip = ({ tip, cross, node, lines, marks, x: xAxis, y: yAxis }, share, height) => {
    const x = valueAt(xAxis, share), known = lines.filter(line => line.node.localName === 'polyline' && line.points.length && !state.off.has(line.name));
    const rows = known.map(line => {
      const nearest = line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)[1];
      return { text: `${line.name} ${format(nearest, 5, node.dataset.percent)}`, distance: Math.abs(position(yAxis, nearest) - (1 - height)) };
    });
    const far = [...rows].sort((a, b) => a.distance - b.distance).slice(MOST_ROWS);
    const title = state.x === 'time' ? `${format(x, 5)} hours` : `${X_NAMES[state.x]} ${Math.round(x).toLocaleString('en')}`;
    const near = marks.filter(mark => Math.abs(mark.share - share) < .008).slice(0, 3).map(mark => mark.label);
    const texts = [title, ...rows.filter(row => !far.includes(row)).map(row => row.text), ...(far.length ? [`and ${far.length} more`] : []), ...near];
    tip.replaceChildren(...texts.flatMap((text, index) => index ? [document.createElement('br'), text] : [text]));
    tip.hidden = cross.hidden = false;
    cross.style.left = `${share * 100}%`;
    tip.style.left = share < .5 ? `calc(${share * 100}% + .6rem)` : 'auto';
    tip.style.right = share < .5 ? 'auto' : `calc(${(1 - share) * 100}% + .6rem)`;
  };
  const attachPlot = node => {
    const area = node.querySelector('.area'), svg = node.querySelector('svg'), pointers = new Map();
    const [tip, cross, box] = ['tip', 'cross', 'selected'].map(name => Object.assign(document.createElement('div'), { className: name, hidden: true }));
    const lines = [...svg.querySelectorAll('polyline, polygon')].map(shape => ({ ...shape.dataset, node: shape,
      values: shape.dataset.values.split(' ').map(row => row.split(',').map(Number)), dots: shape.nextElementSibling?.closest('path.dots') }));
    const plot = { node, area, svg, tip, cross, lines };
    area.append(box, cross, tip);
    Object.assign(area, { tabIndex: 0, role: 'group', ariaLabel: `${node.dataset.title}: chart; arrow keys pan, + and - zoom, 0 resets` });
    const shares = ({ clientX, clientY }) => {
      const { left, top, width, height } = area.getBoundingClientRect();
      return [clamp((clientX - left) / width, 0, 1), clamp((clientY - top) / height, 0, 1)];
    };
    const hide = () => { tip.hidden = cross.hidden = box.hidden = true; };
    const begin = () => { for (const pointer of pointers.values()) pointer.from = pointer.at; plot.start = plot.x; };
    const on = (kinds, act) => kinds.split(' ').forEach(kind => area.addEventListener(kind, act, { passive: false }));
    on('pointerdown', event => {
      if (event.button) return;
      area.setPointerCapture(event.pointerId);
      area.classList.add('dragged');  // `live.js` does not replace it meanwhile
      pointers.set(event.pointerId, { at: shares(event)[0], pans: event.shiftKey || event.pointerType === 'touch' });
      begin();
    });
    on('pointermove', event => {
      const [share, height] = shares(event), pointer = pointers.get(event.pointerId), [a, b] = [...pointers.values()];
      if (pointer) pointer.at = share;
      if (pointer?.pans && (b || state.z)) {  // what was under the fingers stays under them
        const factor = b ? (b.from - a.from) / (b.at - a.at) : 1, left = a.from - a.at * factor;
        if (factor > 0 && Number.isFinite(factor)) view(plot, plot.start, left, left + factor);
        return;
      }
      box.hidden = !pointer || pointer.pans;
      if (pointer) Object.assign(box.style, { left: `${100 * Math.min(share, pointer.from)}%`, width: `${100 * Math.abs(share - pointer.from)}%` });
      showTip(plot, share, height);
    });
    on('pointerup pointercancel', event => {
      const pointer = pointers.get(event.pointerId), ends = pointer ? [pointer.from, pointer.at].sort((a, b) => a - b) : [0, 0];
      pointers.delete(event.pointerId);
      if (pointers.size) return begin();
      area.classList.remove('dragged');
      hide();
      if (event.type === 'pointerup' && !pointer?.pans && ends[1] - ends[0] > .01) view(plot, plot.x, ...ends);
    });
    on('pointerleave', hide);
    on('dblclick', reset);
    on('focus', () => { focused = node.dataset.title; });
    on('blur', () => { if (area.isConnected) focused = ''; });
    on('wheel', event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(plot, shares(event)[0], 1.002 ** clamp(event.deltaY, -300, 300));
    });
    on('keydown', event => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
      event.preventDefault();
      KEYS[event.key](plot);
    });
    return plot;
  };
  const attachName = node => {
    const name = node.dataset.line, toggle = () => change({ off: state.off.symmetricDifference(new Set([name])) });
    Object.assign(node, { tabIndex: 0, role: 'button', title: 'Hide or show; double click: only this one' });
    node.addEventListener('click', toggle);
    node.addEventListener('keydown', event => { if (['Enter', ' '].includes(event.key)) { event.preventDefault(); toggle(); } });
    node.addEventListener('dblclick', () => {
      const others = new Set(plots.flatMap(plot => plot.lines.map(line => line.name)).filter(each => each !== name));
      change({ off: others.size && [...others].every(each => state.off.has(each)) ? new Set() : others });
    });
  };
  const attachControls = bar => {
    const field = name => bar.querySelector(`[name=${name}]`);
    bar.dataset.on = '1';
    bar.addEventListener('input', () => {
      const chosen = { x: field('x').value, lx: field('lx').checked, y: field('y').value, s: Number(field('s').value) };
      change({ ...chosen, z: chosen.x === state.x && chosen.lx === state.lx ? state.z : null });
    });
    field('reset').addEventListener('click', reset);
  };
  const attachAll = () => {
    const read = JSON.parse(document.querySelector('.x-tables')?.dataset.tables ?? '{}'), known = new Map(plots.map(plot => [plot.node, plot]));
    for (const [run, table] of Object.entries(read)) {  // finer values stay, unless the run may have added to them
      const old = tables[run];
      if (old?.fine?.to < old?.rows.at(-1)?.[0]) table.fine = old.fine;
    }
    tables = read;
    plots = all('.plot').map(node => known.get(node) ?? attachPlot(node));
    all('[data-line]:not([role])').forEach(attachName);
    all('.chart-controls:not([data-on])').forEach(attachControls);
    drawAll();
    if (state.z) fetchFine();
    if (document.activeElement === document.body) plots.find(plot => plot.node.dataset.title === focused)?.area.focus({ preventScroll: true });
  };
  addEventListener('hashchange', () => {
    if (location.hash && !location.hash.includes('=')) return writeState();  // a link to a section
    readState();
    drawAll();
    fetchFine();
  });
  addEventListener('updated', attachAll);
  readState();
  attachAll();
  document.getElementById(location.hash.slice(1).split('&')[0])?.scrollIntoView();
}
