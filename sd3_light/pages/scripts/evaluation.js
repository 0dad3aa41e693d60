// A click shows an image in full size, beside the true one of its caption.
addEventListener('click', event => {
  const button = event.target.closest('.evaluated button');
  if (!button) return;
  const card = button.closest('article'), caption = card.querySelector('.caption').textContent;
  const images = [...card.querySelectorAll('img')].map(image => ({ src: image.getAttribute('src'), title: `${image.alt} · ${caption}` }));
  kept = images.length > 1 ? images[0] : null;
  showImage(images.at(-1));
});
