// Update the page while it is open: fetch it again and replace the parts that have changed.
const live = document.querySelector('main[data-live]');
const parts = root => [...root.children];
let shown = live ? parts(live).map(part => part.outerHTML) : [], tag = '';

// What the reader has set in a part: open details, the sliders' positions, checked boxes, how far it is scrolled.
const keepSettings = (old, fresh) => {
  const pairs = selector => {
    const before = old.querySelectorAll(selector);
    return [...fresh.querySelectorAll(selector)].slice(0, before.length).map((node, index) => [before[index], node]);
  };
  for (const [before, node] of pairs('details')) node.open = before.open;
  for (const [before, node] of pairs('input[type=range]')) if (before.value !== before.max) node.dataset.kept = before.value;
  const checked = new Set([...old.querySelectorAll('input:checked')].map(box => box.value));
  for (const box of fresh.querySelectorAll('input[type=checkbox]')) box.checked = checked.has(box.value);
  return () => pairs('.scroll').forEach(([before, node]) => node.scrollTo(before.scrollLeft, before.scrollTop));
};

const showFresh = fresh => {
  const sources = fresh.map(part => part.outerHTML);
  const focused = document.activeElement?.id;
  if (sources.length !== shown.length) {
    live.replaceChildren(...fresh);
  } else {
    parts(live).forEach((part, index) => {
      if (sources[index] === shown[index]) return;
      const restoreScroll = keepSettings(part, fresh[index]);
      part.replaceWith(fresh[index]);
      restoreScroll();
    });
  }
  shown = sources;
  dispatchEvent(new Event('updated'));
  if (focused && document.activeElement === document.body) document.getElementById(focused)?.focus({ preventScroll: true });
};

const update = async () => {
  const started = performance.now();
  try {
    if (!document.hidden && !document.querySelector('main textarea:focus, main .area:active')) {  // neither an open editor nor a dragged chart is replaced
      const reply = await fetch(location.href, { cache: 'no-store', headers: tag ? { 'If-None-Match': tag } : {} });
      if (reply.status !== 304) {
        tag = reply.headers.get('ETag') ?? '';
        const page = new DOMParser().parseFromString(await reply.text(), 'text/html');
        const main = page.querySelector('main');  // also of an error, which says why the page cannot be shown
        if (main) showFresh(parts(main));
      }
      delete document.body.dataset.offline;
    }
  } catch {
    document.body.dataset.offline = '1';
  }
  setTimeout(update, Math.max(2000, 10 * (performance.now() - started)));
};
if (live) setTimeout(update, 2000);
