// Plan: filters presets; shows what one takes of a GPU as the slider moves.
"use strict";
(() => {
  const filter = document.getElementById("preset-filter");
  if (filter) {
    const cards = [...document.querySelectorAll(".card")];
    const show = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const card of cards) card.hidden = !words.every((word) => card.textContent.toLowerCase().includes(word));
      for (const family of document.querySelectorAll(".family")) family.hidden = !family.querySelector(".card:not([hidden])");
      document.getElementById("none-match").hidden = cards.some((card) => !card.hidden);
    };
    filter.addEventListener("input", show);
    show();  // something may have been typed already
  }

  const slider = document.getElementById("memory");
  if (!slider) return;
  const place = document.getElementById("fit"), said = document.getElementById("memory-said");
  const sizes = slider.dataset.sizes.split(" ");
  let asked = 0;

  async function load() {
    const own = ++asked;
    const answer = await fetch(`${place.dataset.source}?memory=${sizes[slider.value]}`);
    const text = await answer.text();
    if (own !== asked || !answer.ok) return;
    place.replaceChildren(...Page.parse(`<div>${text}</div>`).childNodes);
    if (answer.status === 202) setTimeout(() => { if (own === asked) load(); }, 1000);
  }

  function tell() {
    said.textContent = `${sizes[slider.value]} GiB`;
    slider.setAttribute("aria-valuetext", said.textContent);
  }

  slider.addEventListener("input", () => { tell(); Page.remember("memory", slider.value); load(); });
  slider.value = Page.recall("memory") ?? slider.value;
  tell();
  load();
})();
