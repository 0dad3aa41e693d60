// Send the form, ask how far the drawing is, and show each image as soon as it is written.
const form = document.querySelector('#draw'), state = document.querySelector('#state');
const cancel = document.querySelector('#cancel'), drawn = document.querySelector('#drawn');
const table = drawn.querySelector('table'), grid = document.querySelector('#grid'), warnings = document.querySelector('#warnings');
let current = 0;

const element = (tag, text = '', className = '') => {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  return node;
};

const request = async (path, options) => {
  const reply = await fetch(path, options), answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  return answer;
};

// Cells are filled as images arrive; before that they show a preview, and how many steps are done.
const fillCell = (cell, label, image, seen) => {
  const shown = image ? image.name : seen ? `${seen.step} ${seen.preview?.length}` : '';
  if (cell.dataset.shown === shown) return;
  cell.dataset.shown = shown;
  if (!image && !seen?.preview) {
    cell.replaceChildren(element('div', seen ? `step ${seen.step}` : '', 'empty'));
    return;
  }
  const node = element('img');
  node.src = image ? `/playground/images/${image.name}` : seen.preview;
  node.alt = image ? label : `${label}, preview after step ${seen.step}`;
  if (!image) {
    cell.replaceChildren(node);
    return;
  }
  const link = element('a');
  link.href = node.src;
  link.append(node);
  cell.replaceChildren(link);
};

const showTable = drawing => {
  const key = ({ column, row }) => `${column} ${row}`;
  const images = new Map(drawing.images.map(image => [key(image), image]));
  const seen = new Map(drawing.seen.map(each => [key(each), each]));
  if (table.dataset.drawing !== String(drawing.id)) {
    const head = element('tr');
    head.append(element('th'), ...drawing.columns.map(label => element('th', label)));
    table.replaceChildren(head, ...drawing.rows.map(label => {
      const row = element('tr');
      row.append(element('th', label), ...drawing.columns.map(() => element('td')));
      return row;
    }));
    table.dataset.drawing = drawing.id;
  }
  drawing.rows.forEach((label, row) => drawing.columns.forEach((name, column) => {
    const place = key({ column, row });
    fillCell(table.rows[row + 1].cells[column + 1], `${name}, ${label}`, images.get(place), seen.get(place));
  }));
  grid.hidden = !drawing.grid;
  grid.href = `/playground/images/${drawing.grid}`;
  drawn.hidden = false;
};

const follow = async drawing => {
  while (current === drawing.id) {
    showTable(drawing);
    state.textContent = drawing.error || `${drawing.status} · ${drawing.images.length} of ${drawing.total} images`;
    warnings.replaceChildren(...drawing.warnings.map(line => element('div', line)));
    warnings.hidden = !drawing.warnings.length;
    cancel.hidden = drawing.done;
    if (drawing.done) return;
    await new Promise(resolve => setTimeout(resolve, 400));
    drawing = await request(`/playground/drawings/${drawing.id}`);
  }
};

form.addEventListener('submit', async event => {
  event.preventDefault();
  const data = new FormData(form);
  const boxes = [...form.querySelectorAll('[data-lora]:checked')];
  const strength = box => form.querySelector(`[data-strength="${box.dataset.lora}"]`).value;
  const chosen_loras = Object.fromEntries(boxes.map(box => [box.dataset.lora, strength(box)]));
  const preview = form.elements.preview.checked;
  const values = { ...Object.fromEntries(data), models: data.getAll('models'), chosen_loras, preview };
  try {
    const drawing = await request('/playground/drawings', {
      method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(values),
    });
    current = drawing.id;
    await follow(drawing);
  } catch (error) {
    state.textContent = error.message;
    cancel.hidden = true;
  }
});
cancel.addEventListener('click', () => request(`/playground/drawings/${current}/cancel`, { method: 'POST' }));

// Only axes other than models and seeds, which have separate fields, take values.
const showValues = () => {
  for (const name of ['columns', 'rows']) {
    const values = form.elements[`${name}_values`];
    values.parentElement.hidden = ['model', 'seed'].includes(form.elements[name].value);
  }
};
for (const name of ['columns', 'rows']) form.elements[name].addEventListener('change', showValues);
showValues();

// The server knows which of the listed models and LoRAs have the weights that an image names.
const refill = async settings => {
  try {
    const facts = await request('/playground/settings', {
      method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ settings }),
    });
    for (const name of ['prompt', 'negative_prompt', 'seeds', 'steps', 'guidance', 'shift', 'width', 'height', 'sampler', 'dtype']) {
      form.elements[name].value = facts[name] ?? '';
    }
    form.elements.loras.value = '';
    form.elements.columns.value = 'model';
    form.elements.rows.value = 'seed';
    showValues();
    for (const box of form.querySelectorAll('[name=models]')) box.checked = facts.model ? box.value === facts.model : box.checked;
    for (const box of form.querySelectorAll('[data-lora]')) {
      box.checked = box.dataset.lora in facts.chosen_loras;
      if (box.checked) form.querySelector(`[data-strength="${box.dataset.lora}"]`).value = facts.chosen_loras[box.dataset.lora];
    }
    warnings.replaceChildren(...facts.notes.map(line => element('div', line)));
    warnings.hidden = !facts.notes.length;
    state.textContent = '';
  } catch (error) {
    state.textContent = error.message;
  }
  form.scrollIntoView();
};
for (const button of document.querySelectorAll('[data-facts]')) {
  button.addEventListener('click', () => refill(button.dataset.facts));
}

// The text chunk `sd3_light` of a PNG: in Latin-1, or in UTF-8 with a language and a translated keyword before it.
const settingsOf = async file => {
  const bytes = new Uint8Array(await file.arrayBuffer()), view = new DataView(bytes.buffer);
  const text = (start, end, coding) => new TextDecoder(coding).decode(bytes.subarray(start, end));
  for (let at = 8; at + 12 <= bytes.length;) {
    const start = at + 8, end = start + view.getUint32(at), kind = text(at + 4, start, 'latin1');
    if (end > bytes.length) break;
    const name = bytes.indexOf(0, start);
    if (['tEXt', 'iTXt'].includes(kind) && name > 0 && text(start, name, 'latin1') === 'sd3_light') {
      if (kind === 'tEXt') return text(name + 1, end, 'latin1');
      const language = bytes.indexOf(0, name + 3), keyword = bytes.indexOf(0, language + 1);
      if (bytes[name + 1] === 0) return text(keyword + 1, end, 'utf-8');  // compressed ones are other programs'
    }
    at = end + 4;
  }
  throw new Error(`${file.name} has no settings of sd3-light; choose a PNG that it drew`);
};
const choose = async files => {
  try {
    if (files.length) await refill(await settingsOf(files[0]));
  } catch (error) {
    state.textContent = error.message;
    form.scrollIntoView();
  }
};
const drop = document.querySelector('#drop');
drop.querySelector('input').addEventListener('change', event => choose(event.target.files));
addEventListener('dragover', event => event.preventDefault());
addEventListener('drop', event => {
  event.preventDefault();
  choose(event.dataTransfer.files);
});
