// Check the text while it is edited, set values from the form, save, and show the documentation of a key.
const box = document.querySelector('#editor'), area = document.querySelector('#text');
const gutter = document.querySelector('#gutter'), faultList = document.querySelector('#faults');
const fields = document.querySelector('#form'), finder = document.querySelector('#find');
const doc = document.querySelector('#doc'), saveButton = document.querySelector('#save');
const saved = document.querySelector('#saved'), resuming = document.querySelector('#resuming');
let savedText = area.value, lines = [], asked = 0, timer = 0, settings = Promise.resolve();

const make = (tag, text = '', className = '') => {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  return node;
};

const post = async (action, values) => {
  const reply = await fetch(`${box.dataset.path}/${action}`, {
    method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(values),
  });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  return answer;
};

const goTo = line => {
  const before = area.value.split('\n').slice(0, line - 1).join('\n').length + (line > 1 ? 1 : 0);
  area.focus();
  area.setSelectionRange(before, before);
  area.scrollTop = Math.max(0, (line - 5) * parseFloat(getComputedStyle(area).lineHeight));
  showDocAtCursor();
};

const showGutter = faulty => {
  const count = area.value.split('\n').length, parts = [];
  for (let line = 1; line <= count; line++) {
    parts.push(faulty.has(line) ? make('b', `● ${line}`) : document.createTextNode(String(line)), '\n');
  }
  gutter.replaceChildren(...parts);
  gutter.scrollTop = area.scrollTop;
};

const showFaults = faults => {
  showGutter(new Set(faults.map(fault => fault.line)));
  faultList.replaceChildren(...faults.map(fault => {
    const item = make('li'), place = make(fault.line ? 'button' : 'span', fault.line ? `line ${fault.line}` : fault.file);
    if (fault.line) {
      place.type = 'button';
      place.addEventListener('click', () => goTo(fault.line));
    }
    item.append(place, ' ', make('b', fault.key), ' ', fault.text);
    return item;
  }));
  if (!faults.length) faultList.append(make('li', 'None.', 'soft'));
};

const findKeys = () => {
  const wanted = finder.value.trim().toLowerCase();
  for (const entry of fields.querySelectorAll('.entry')) {
    const text = `${entry.querySelector('[name]').name} ${entry.dataset.meaning}`.toLowerCase();
    entry.hidden = Boolean(wanted) && !text.includes(wanted);
  }
  for (const group of fields.querySelectorAll('details')) {
    const isFound = [...group.querySelectorAll('.entry')].some(entry => !entry.hidden);
    group.hidden = !isFound;
    if (wanted && isFound) group.open = true;
  }
};

const showForm = html => {
  if (!html) return;  // with a fault of syntax the last form stays
  const open = new Map([...fields.querySelectorAll('details')].map(group => [group.dataset.group, group.open]));
  const focused = fields.contains(document.activeElement) ? document.activeElement.name : '';
  const scrolled = fields.scrollTop;
  fields.replaceChildren(...new DOMParser().parseFromString(html, 'text/html').body.childNodes);
  for (const group of fields.querySelectorAll('details')) {
    if (open.has(group.dataset.group)) group.open = open.get(group.dataset.group);
  }
  findKeys();
  fields.scrollTop = scrolled;
  if (focused) fields.elements[focused]?.focus();
};

const showDoc = (key, entry) => {
  const facts = [entry.dataset.type, entry.dataset.default && `default: ${entry.dataset.default}`].filter(Boolean);
  doc.replaceChildren(make('p', key, 'key'), make('p', entry.dataset.meaning), make('p', facts.join('; '), 'soft'));
};

const showDocAtCursor = () => {
  const line = area.value.slice(0, area.selectionStart).split('\n').length;
  const key = lines.filter(each => each.line <= line).at(-1)?.key;
  const entry = key && fields.elements[key]?.closest('.entry');
  if (entry) showDoc(key, entry);
};

const showReview = answer => {
  lines = answer.keys;
  showForm(answer.form);
  showFaults(answer.faults);
};

const setDirty = () => {
  const isDirty = area.value !== savedText;
  saveButton.disabled = !isDirty;
  for (const button of document.querySelectorAll('.begin')) button.disabled = isDirty;
  if (isDirty) saved.textContent = 'not saved';
};

const review = async () => {
  const number = ++asked;
  try {
    const answer = await post('review', { text: area.value });
    if (number === asked) showReview(answer);
  } catch (error) {
    if (number === asked) saved.textContent = error.message;
  }
};

// One value after the other: each is put into the text that the one before has left, and what was typed meanwhile stays.
const setValue = async (key, value) => {
  try {
    for (let text = null; text !== area.value;) {
      text = area.value;
      const answer = await post('value', { text, key, value });
      if (text !== area.value) continue;
      asked++;
      text = area.value = answer.text;
      showReview(answer);
    }
    setDirty();
  } catch (error) {
    saved.textContent = error.message;
  }
};

const showResume = async () => {
  if (!box.dataset.resume) return;
  try {
    const { lines: changes } = await post('resume', {});
    resuming.replaceChildren(...changes.map(line => make('p', line)));
    resuming.hidden = !changes.length;
  } catch (error) {
    resuming.replaceChildren(make('p', error.message));
    resuming.hidden = false;
  }
};

const save = async () => {
  const text = area.value;
  saveButton.disabled = true;
  try {
    box.dataset.version = (await post('save', { text, version: box.dataset.version })).version;
    savedText = text;
    saved.textContent = 'saved';
    setDirty();
    await showResume();
  } catch (error) {
    setDirty();
    saved.textContent = error.message;
  }
};

area.addEventListener('input', () => {
  setDirty();
  showGutter(new Set());
  clearTimeout(timer);
  timer = setTimeout(review, 300);
});
area.addEventListener('scroll', () => { gutter.scrollTop = area.scrollTop; });
for (const kind of ['keyup', 'click']) area.addEventListener(kind, showDocAtCursor);
fields.addEventListener('submit', event => event.preventDefault());
fields.addEventListener('change', ({ target }) => {
  const { name, value } = target;
  settings = settings.then(() => setValue(name, value));
});
fields.addEventListener('focusin', ({ target }) => {
  const entry = target.closest('.entry');
  if (entry) showDoc(target.name, entry);
});
finder.addEventListener('input', findKeys);
saveButton.addEventListener('click', save);
addEventListener('keydown', event => {
  if ((event.ctrlKey || event.metaKey) && event.key === 's') {
    event.preventDefault();
    if (!saveButton.disabled) save();
  }
});
addEventListener('beforeunload', event => { if (area.value !== savedText) event.preventDefault(); });
showGutter(new Set());
review();
showResume();
