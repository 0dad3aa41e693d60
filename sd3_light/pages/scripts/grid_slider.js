// Show one sample grid at a time, chosen by a slider. Without this script all grids are shown, one below the other.
const attachSlider = slider => {
  const grids = slider.closest('.grids');
  const input = slider.querySelector('input'), output = slider.querySelector('output');
  const figures = [...grids.querySelectorAll('figure')];
  const show = () => {
    figures.forEach((figure, index) => { figure.hidden = index !== Number(input.value); });
    output.textContent = figures[input.value].querySelector('figcaption').textContent;
  };
  grids.querySelectorAll('figcaption').forEach(caption => { caption.hidden = true; });
  input.value = input.dataset.kept ?? input.max;
  input.addEventListener('input', show);
  slider.hidden = false;
  show();
};
const attachSliders = () => document.querySelectorAll('.slider[hidden]').forEach(attachSlider);
addEventListener('updated', attachSliders);
attachSliders();
