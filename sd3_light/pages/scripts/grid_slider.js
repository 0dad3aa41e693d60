// Show one sample grid at a time, chosen by a slider. Without this script all grids are shown, one below the other.
for (const grids of document.querySelectorAll('.grids')) {
  const slider = grids.querySelector('.slider');
  if (!slider) continue;
  const input = slider.querySelector('input'), output = slider.querySelector('output');
  const figures = [...grids.querySelectorAll('figure')];
  const show = () => {
    figures.forEach((figure, index) => { figure.hidden = index !== Number(input.value); });
    output.textContent = figures[input.value].querySelector('figcaption').textContent;
  };
  grids.querySelectorAll('figcaption').forEach(caption => { caption.hidden = true; });
  input.value = input.max;
  input.addEventListener('input', show);
  slider.hidden = false;
  show();
}
