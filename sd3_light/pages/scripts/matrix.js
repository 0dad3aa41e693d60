// Samples as a table: two of prompts, steps and runs are rows and columns, and the slider moves along the third.
// The state is in the address. Images are requested when they come into view; those next to the slider are preloaded.
const TITLES = { prompt: 'prompts', step: 'steps', run: 'runs' };
const choice = document.querySelector('#choice'), query = new URLSearchParams(location.search);
const PRELOADED = 80;
let data, names, images, place = query.get('at') ?? '';

const node = (tag, text = '', className = '') => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
};
const axis = name => (name in TITLES ? name : null);
let rows = axis(query.get('rows')) ?? 'prompt';
let columns = axis(query.get('columns')) ?? 'run';
if (columns === rows) columns = Object.keys(TITLES).find(name => name !== rows);
const slid = () => Object.keys(TITLES).find(name => name !== rows && name !== columns);

// Read what the server sent: labels of each axis, and the address of an image by its place on all three.
const readMatrix = () => {
  const section = document.querySelector('#matrix'), { keys, layouts, series } = JSON.parse(section.dataset.matrix);
  const weights = choice.elements.weights?.value ?? '';
  const shown = series.filter(each => !weights || each.weights === weights);
  const steps = [...new Set(shown.flatMap(each => each.grids.map(([step]) => step)))].sort((a, b) => a - b);
  const several = new Set(shown.map(each => each.id)).size > 1;
  const label = each => [several || !each.weights ? each.run : '', each.weights && `${each.weights} weights`].filter(Boolean).join(' · ');
  names = {
    prompt: keys.map(([prompt, seed]) => `${prompt} · seed ${seed}`),
    step: steps.map(step => `step ${step.toLocaleString('en')}`),
    run: shown.map(label),
  };
  images = new Map();
  shown.forEach((each, run) => each.grids.forEach(([step, file, layout]) => layouts[layout].forEach((prompt, cell) => {
    if (prompt < 0) return;
    images.set(`${prompt} ${steps.indexOf(step)} ${run}`, `/runs/${each.id}/sample?file=${file}&cell=${cell}`);
  })));
  data = { section, steps };
};
const source = at => images.get(`${at.prompt} ${at.step} ${at.run}`);
// A position along the slider as it is written in the address: steps by their number, others by their index.
const written = index => String(slid() === 'step' ? data.steps[index] : index);

const showMatrix = () => {
  const table = data.section.querySelector('table'), input = data.section.querySelector('input');
  if (!table) return;
  const along = slid(), last = names[along].length - 1;
  const index = names[along].findIndex((_, at) => written(at) === place);
  input.max = last;
  input.value = index >= 0 ? index : along === 'step' ? last : 0;
  input.parentElement.hidden = last < 1;
  const head = node('tr');
  head.append(node('td'), ...names[columns].map(name => node('th', name)));
  table.replaceChildren(head, ...names[rows].map((name, row) => {
    const line = node('tr'), title = node('th', name);
    title.dir = 'auto';
    line.append(title, ...names[columns].map((_, column) => {
      const cell = node('td');
      cell.dataset.row = row;
      cell.dataset.column = column;
      return cell;
    }));
    return line;
  }));
  for (const title of head.children) title.dir = 'auto';
  moveTo(Number(input.value));
};
const placeOf = (cell, index) => ({ [rows]: Number(cell.dataset.row), [columns]: Number(cell.dataset.column), [slid()]: index });
const titleOf = at => `${names.prompt[at.prompt]} · ${names.step[at.step]} · ${names.run[at.run]}`;

const fillCell = (cell, index) => {
  const at = placeOf(cell, index), src = source(at);
  let image = cell.querySelector('img');
  if (!src) {
    cell.replaceChildren(node('div', 'no image', 'empty'));
    return;
  }
  if (!image) {
    const button = node('button');
    image = node('img');
    image.loading = 'lazy';
    button.type = 'button';
    button.append(image);
    cell.replaceChildren(button);
  }
  if (image.getAttribute('src') !== src) image.src = src;
  image.alt = titleOf(at);
  cell.classList.toggle('kept', isKept(src));
};
const moveTo = index => {
  const input = data.section.querySelector('input');
  input.value = index;
  place = written(index);
  data.section.querySelector('output').textContent = names[slid()][index];
  const cells = [...data.section.querySelectorAll('td[data-row]')];
  for (const cell of cells) fillCell(cell, index);
  save();
  preload(cells, index);
};
const preload = (cells, index) => {
  const shown = cells.filter(cell => {
    const box = cell.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  });
  const near = [1, -1, 2, -2].flatMap(move => shown.map(cell => source(placeOf(cell, index + move))));
  for (const src of near.filter(Boolean).slice(0, PRELOADED)) new Image().src = src;
};
const save = () => {
  const state = { rows, columns, at: place, weights: choice.elements.weights?.value };
  for (const [name, value] of Object.entries(state)) value ? query.set(name, value) : query.delete(name);
  history.replaceState(null, '', `?${query}`);
};
const showAxes = () => {
  for (const [name, value] of [['rows', rows], ['columns', columns]]) {
    choice.elements[name].replaceChildren(...Object.entries(TITLES).map(([id, title]) => new Option(title, id, false, id === value)));
  }
};
const startMatrix = () => {
  // the server's parts are new after an update, and know nothing of the address
  if (choice.elements.weights) choice.elements.weights.value = query.get('weights') ?? '';
  readMatrix();
  showMatrix();
};

addEventListener('input', event => {
  if (event.target.closest('#matrix .slider')) moveTo(Number(event.target.value));
});
addEventListener('change', event => {
  const { name, value } = event.target;
  if (name === 'rows' && value === columns) columns = rows;
  if (name === 'columns' && value === rows) rows = columns;
  if (name === 'rows') rows = value;
  if (name === 'columns') columns = value;
  if (name === 'weights') query.set('weights', value);
  if (!['rows', 'columns', 'weights'].includes(name)) return;
  if (name !== 'weights') place = '';
  showAxes();
  startMatrix();
});
addEventListener('keydown', event => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || event.target.matches('input, select, textarea, .scroll')) return;
  const input = data.section.querySelector('input'), before = Number(input?.value);
  const index = before + step;
  if (!input || index < 0 || index > Number(input.max)) return;
  const cell = viewer.open && [...data.section.querySelectorAll('td')].find(each => each.querySelector('img')?.getAttribute('src') === current.src);
  moveTo(index);
  if (cell) showImage({ src: cell.querySelector('img')?.getAttribute('src') ?? current.src, title: titleOf(placeOf(cell, index)) });
});
addEventListener('click', event => {
  const image = event.target.closest('#matrix td')?.querySelector('img');
  if (image) showImage({ src: image.getAttribute('src'), title: image.alt });
});
choice.addEventListener('submit', () => {
  const hidden = node('input');
  hidden.type = 'hidden';
  hidden.name = 'at';
  hidden.value = place;
  choice.append(hidden);
});
addEventListener('updated', startMatrix);
addEventListener('kept', () => data.section.querySelectorAll('td').forEach(cell => {
  const image = cell.querySelector('img');
  if (image) cell.classList.toggle('kept', isKept(image.getAttribute('src')));
}));
showAxes();
startMatrix();
