// Show an image in full size; one that is kept is shown beside the next, under a moving edge, or in turns.
const viewer = document.querySelector('#viewer'), stage = viewer.querySelector('.stage');
const [mine, other] = stage.querySelectorAll('figure'), edge = viewer.querySelector('input');
let kept = null, current = null, mode = 'beside';

const fill = (figure, image) => {
  const node = figure.querySelector('img');
  node.onload = () => node.classList.toggle('small', Math.max(node.naturalWidth, node.naturalHeight) <= 128);
  node.src = image.src;
  node.alt = figure.querySelector('figcaption').textContent = image.title;
};
const arrange = () => {
  const compares = kept && kept.src !== current.src;
  viewer.querySelector('[data-modes]').hidden = !compares;
  viewer.querySelector('[data-keep]').hidden = Boolean(compares);
  stage.dataset.mode = compares ? mode : 'alone';
  fill(mine, compares ? kept : current);
  if (compares) fill(other, current);
  mine.hidden = false;
  other.hidden = !compares || mode === 'toggle';
  edge.hidden = !compares || mode !== 'swipe';
  for (const button of viewer.querySelectorAll('button[data-mode]')) button.ariaPressed = String(button.dataset.mode === mode);
};
const flip = () => {
  if (stage.dataset.mode === 'toggle') mine.hidden = !(other.hidden = !other.hidden);
};
const showImage = image => {
  current = image;
  arrange();
  if (!viewer.open) viewer.showModal();
};
const isKept = src => kept?.src === src;

viewer.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (event.target === viewer) viewer.close();
  if (event.target.closest('.stage')) flip();
  if (button?.dataset.mode) {
    mode = button.dataset.mode;
    arrange();
  }
  if (button?.matches('[data-keep]')) {
    kept = current;
    viewer.close();
    dispatchEvent(new Event('kept'));
  }
  if (button?.matches('[data-drop]')) {
    kept = null;
    arrange();
    dispatchEvent(new Event('kept'));
  }
});
viewer.addEventListener('keydown', event => {
  if (event.key === ' ' && event.target.tagName !== 'BUTTON') {
    event.preventDefault();
    flip();
  }
});
edge.addEventListener('input', () => stage.style.setProperty('--edge', `${edge.value}%`));
