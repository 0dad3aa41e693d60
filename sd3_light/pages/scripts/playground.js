// Send the form, ask how far the drawing is, and show each image as soon as it is written.
const form = document.querySelector('#draw'), state = document.querySelector('#state');
const cancel = document.querySelector('#cancel'), drawn = document.querySelector('#drawn');
const table = drawn.querySelector('table'), warnings = document.querySelector('#warnings');
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

// One row per seed, one column per model; cells are filled as images arrive.
const showTable = drawing => {
  const models = [...form.querySelectorAll('[name=models]:checked')].map(box => box.parentElement.textContent.trim());
  const cells = new Map(drawing.images.map(image => [`${image.model} ${image.seed}`, image]));
  const head = element('tr');
  head.append(element('th'), ...models.map(model => element('th', model)));
  const rows = drawing.seeds.map(seed => {
    const row = element('tr');
    row.append(element('th', `seed ${seed}`), ...models.map(model => {
      const cell = element('td'), image = cells.get(`${model} ${seed}`);
      if (!image) {
        cell.append(element('div', '', 'empty'));
        return cell;
      }
      const link = element('a'), shown = element('img');
      link.href = shown.src = `/playground/images/${image.name}`;
      shown.alt = `${model}, seed ${seed}`;
      link.append(shown);
      cell.append(link);
      return cell;
    }));
    return row;
  });
  if (table.dataset.shown !== `${drawing.id} ${drawing.images.length}`) table.replaceChildren(head, ...rows);
  table.dataset.shown = `${drawing.id} ${drawing.images.length}`;
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
    await new Promise(resolve => setTimeout(resolve, 500));
    drawing = await request(`/playground/drawings/${drawing.id}`);
  }
};

form.addEventListener('submit', async event => {
  event.preventDefault();
  const data = new FormData(form);
  const values = { ...Object.fromEntries(data), models: data.getAll('models') };
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

for (const button of document.querySelectorAll('[data-facts]')) {
  button.addEventListener('click', () => {
    const facts = JSON.parse(button.dataset.facts);
    for (const name of ['prompt', 'negative_prompt', 'steps', 'guidance', 'width', 'height', 'sampler', 'dtype']) {
      form.elements[name].value = facts[name] ?? '';
    }
    form.elements.seeds.value = facts.seed;
    form.scrollIntoView();
  });
}
