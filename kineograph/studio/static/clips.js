// Clips that play in step: sheets of frames on canvases, all driven by one clock. A click shows one larger.
"use strict";
(() => {
  const play = document.getElementById("play"), slider = document.getElementById("frame"), size = document.getElementById("size");
  if (!play) return;
  const SMALL = 160;  // pictures up to this many pixels are enlarged without blurring
  const clips = new Map();  // button → { image, frames, columns, width, height, shown }
  let rate = 8, longest = 1, frame = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;

  // Loading ---------------------------------------------------------------------------------------------------------

  async function load(button) {
    const data = button.dataset;
    let image, facts;
    if (data.src) {
      image = new Image();
      image.src = data.src;
      await image.decode();
      facts = (name) => data[name];
    } else {
      const answer = await fetch(data.sheet);
      if (answer.status === 422) data.reason = await answer.text();
      if (!answer.ok) throw new Error(String(answer.status));
      image = await createImageBitmap(await answer.blob());
      facts = (name) => answer.headers.get(`x-${name}`);
    }
    const clip = { image, shown: -1 };
    for (const name of ["frames", "columns", "width", "height"]) clip[name] = Number(facts(name));
    const canvas = button.querySelector("canvas");
    canvas.width = clip.width;
    canvas.height = clip.height;
    button.classList.toggle("small", Math.max(clip.width, clip.height) <= SMALL);
    clips.set(button, clip);
    if (clip.frames > longest) {
      longest = clip.frames;
      slider.max = longest - 1;
      rate = Number(facts("fps"));
      showControls();
    }
    paint(button, clip);
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      load(entry.target).catch(() => {
        entry.target.dataset.reason ??= "cannot be read";
        entry.target.title = entry.target.dataset.reason;
        entry.target.classList.add("unreadable");
      });
    }
  }, { rootMargin: "300px" });

  function adopt(root) {
    for (const known of clips.keys()) if (!known.isConnected) clips.delete(known);
    for (const button of root.querySelectorAll(".clip")) if (!clips.has(button)) seen.observe(button);
  }
  document.addEventListener("clips-added", () => adopt(document));
  adopt(document);

  // Playing ---------------------------------------------------------------------------------------------------------

  function paint(button, clip) {
    const number = frame % clip.frames;
    if (clip.shown === number) return;
    clip.shown = number;
    const x = (number % clip.columns) * clip.width, y = Math.floor(number / clip.columns) * clip.height;
    button.querySelector("canvas").getContext("2d").drawImage(clip.image, x, y, clip.width, clip.height, 0, 0, clip.width, clip.height);
  }

  function showFrame() {
    slider.value = frame;
    for (const [button, clip] of clips) paint(button, clip);
  }

  let last = 0;
  function tick(now) {
    if (playing && longest > 1 && now - last >= 1000 / rate) {
      last = now;
      frame = (frame + 1) % longest;
      showFrame();
    }
    requestAnimationFrame(tick);
  }
  requestAnimationFrame(tick);

  const controls = [play, slider.parentElement, document.querySelector(".player .hint")];
  function showControls() {  // still pictures need none
    for (const control of controls) control.hidden = longest < 2;
  }
  showControls();

  function setPlaying(value) {
    playing = value;
    play.setAttribute("aria-pressed", String(playing));
  }
  setPlaying(playing);
  play.addEventListener("click", () => setPlaying(!playing));
  slider.addEventListener("input", () => { setPlaying(false); frame = Number(slider.value); showFrame(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === " " && !event.target.closest("button, input, select, textarea, a, dialog")) { event.preventDefault(); setPlaying(!playing); }
  });

  const resize = () => document.documentElement.style.setProperty("--cell", `${size.value}px`);
  const wall = document.querySelector(".wall:not(.sheets)");
  if (wall) {  // few columns: larger pictures
    const columns = wall.tHead.rows[0].cells.length - 1;
    size.value = Math.max(88, Math.min(176, Math.floor((wall.parentElement.clientWidth - 240) / columns) - 8));
  }
  size.addEventListener("input", resize);
  resize();

  // Larger ----------------------------------------------------------------------------------------------------------

  const dialog = document.getElementById("large"), media = document.getElementById("large-media"), title = document.getElementById("large-caption");
  let opened = null;

  function enlarge(button) {
    opened = button;
    title.textContent = `${button.dataset.caption || "(no caption)"}${button.dataset.step ? ` · step ${button.dataset.step}` : ""}`;
    let shown;
    if (button.dataset.file && button.dataset.file.endsWith(".mp4")) {
      shown = Object.assign(document.createElement("video"), { src: button.dataset.file, controls: true, loop: true, muted: true, autoplay: true });
    } else if (button.dataset.file) {
      shown = Object.assign(document.createElement("img"), { src: button.dataset.file, alt: button.dataset.caption });
    } else {  // a report: play the embedded frames
      shown = document.createElement("span");
      shown.dataset.large = "1";
      const canvas = document.createElement("canvas"), clip = clips.get(button);
      if (!clip) { load(button).then(() => enlarge(button), () => {}); return; }  // clicked before it was decoded
      canvas.width = clip.width;
      canvas.height = clip.height;
      canvas.style.width = "100%";
      shown.append(canvas);
      clips.delete(shown);
      for (const known of [...clips.keys()]) if (known.dataset.large) clips.delete(known);
      clips.set(shown, { ...clip, shown: -1 });
      paint(shown, clips.get(shown));
    }
    shown.classList.toggle("small", button.classList.contains("small"));
    if (shown.firstElementChild) shown.firstElementChild.classList.toggle("small", button.classList.contains("small"));
    media.replaceChildren(shown);
    if (!dialog.open) dialog.showModal();
  }

  function move(rows, columns) {
    const cell = opened.closest("td");
    if (!cell) {  // no table: the one before or after
      const all = [...document.querySelectorAll(".clip")];
      const next = all[all.indexOf(opened) + (rows || columns)];
      if (next) enlarge(next);
      return;
    }
    let row = cell.parentElement, index = cell.cellIndex;
    for (let tries = 0; tries < 200; tries++) {
      index += columns;
      if (rows) row = rows > 0 ? row.nextElementSibling : row.previousElementSibling;
      const found = row && row.cells[index] && row.cells[index].querySelector(".clip");
      if (found) return enlarge(found);
      if (!row || !row.cells[index] || index === 0) return;
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".clip");
    if (button) enlarge(button);
    if (event.target === dialog) dialog.close();
  });
  dialog.addEventListener("close", () => { media.replaceChildren(); if (opened) opened.focus(); });
  dialog.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in moves && event.target.tagName !== "VIDEO") { event.preventDefault(); move(...moves[event.key]); }
  });
  document.getElementById("large-previous").addEventListener("click", () => move(0, -1));
  document.getElementById("large-next").addEventListener("click", () => move(0, 1));
  document.getElementById("large-close").addEventListener("click", () => dialog.close());
})();
