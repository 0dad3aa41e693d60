// Edit captions in place, and count the marked samples.
const base = location.pathname;

const ask = async (path, options = {}) => {
  const reply = await fetch(base + path, { ...options, headers: { Accept: 'application/json' } });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  return answer;
};

const node = (tag, text = '', className = '') => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
};

const close = (box, captions) => {
  box.querySelector('form')?.remove();
  if (captions) {
    const text = captions[Number(box.dataset.number)] ?? '';
    const shown = box.querySelector('.caption');
    shown.textContent = text || 'no caption';
    shown.classList.toggle('soft', !text);
  }
  for (const part of box.children) part.hidden = false;
};

const openNext = box => {
  const all = [...document.querySelectorAll('.edited .edit')];
  all[all.indexOf(box.querySelector('.edit')) + 1]?.click();
};

const open = async box => {
  const key = box.closest('.sample').dataset.key, number = Number(box.dataset.number);
  const form = node('form'), area = node('textarea'), row = node('div', '', 'row');
  const save = node('button', 'Save', 'quiet'), cancel = node('button', 'Cancel', 'quiet'), state = node('output');
  for (const part of box.children) part.hidden = true;
  box.append(form);
  form.append(row);
  row.append(state);
  state.textContent = 'reading the file …';
  cancel.type = 'button';
  cancel.addEventListener('click', () => close(box));
  let old = '';
  try {
    const place = await ask(`/caption?key=${encodeURIComponent(key)}`);
    old = place.captions[number] ?? '';
    state.textContent = `${place.is_new ? 'new file ' : ''}${place.file.split('/').pop()} · Ctrl+Enter saves and opens the next`;
  } catch (error) {
    state.textContent = error.message;
    row.append(cancel);
    return;
  }
  area.value = old;
  area.rows = Math.min(12, 2 + Math.ceil(old.length / 30));
  area.dir = 'auto';
  area.setAttribute('aria-label', `Caption of ${key}`);
  form.prepend(area);
  row.prepend(save, cancel);
  area.focus();
  const send = async next => {
    if (area.value === old) {
      close(box);
      if (next) openNext(box);
      return;
    }
    save.disabled = true;
    try {
      const body = JSON.stringify({ key, number, old, new: area.value });
      const answer = await ask('/caption', { method: 'POST', body });
      close(box, answer.captions);
      box.closest('.sample').dataset.saved = '1';
      if (next) openNext(box);
    } catch (error) {
      state.textContent = error.message;
      save.disabled = false;
    }
  };
  form.addEventListener('submit', event => { event.preventDefault(); send(false); });
  area.addEventListener('keydown', event => {
    if (event.key === 'Escape') close(box);
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) { event.preventDefault(); send(true); }
  });
};

const countMarked = () => {
  const output = document.querySelector('#marked');
  if (output) output.textContent = document.querySelectorAll('[name=key]:checked').length;
};

document.addEventListener('click', event => {
  if (event.target.matches('.edited .edit')) open(event.target.closest('.edited'));
  if (event.target.matches('#mark-all')) {
    const boxes = [...document.querySelectorAll('[name=key]')], all = boxes.every(box => box.checked);
    for (const box of boxes) box.checked = !all;
    countMarked();
  }
});
document.addEventListener('change', countMarked);
addEventListener('updated', countMarked);
addEventListener('pageshow', countMarked);
