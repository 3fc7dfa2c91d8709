// Data: shows the items that a search finds, page by page, and asks a codec to rebuild one.
"use strict";
(() => {
  const items = document.getElementById("items"), find = document.getElementById("find"), check = document.getElementById("check");
  const part = (id) => document.getElementById(id);
  const source = items.dataset.source;
  let show = null, page = 1, asked = 0, latest = null;
  const waiting = new Map();  // number of the job → the item's figure and its run
  const post = (address, body) => fetch(address, { method: "POST", body, headers: body ? { "content-type": "application/json" } : {} });

  function explain(text) {
    part("error").hidden = !text;
    part("error").textContent = text || "";
  }

  // The items -------------------------------------------------------------------------------------------------------

  const choices = () => new URLSearchParams(new FormData(check));

  async function load() {
    const own = ++asked;
    const query = choices();
    query.set("q", find.elements.q.value);
    query.set("show", show ?? find.elements.show.value);
    query.set("page", page);
    const answer = await fetch(`${source}/items?${query}`);
    const text = await answer.text();
    if (own !== asked) return;  // a later search has begun
    if (!answer.ok) return explain("These choices cannot be used: give a size such as 256 or 480x720.");
    const fresh = Page.parse(`<div>${text}</div>`);
    const before = items.querySelector("details.summary"), details = fresh.querySelector("details.summary");
    if (before && details) details.open = before.open;
    items.replaceChildren(...fresh.childNodes);
    document.dispatchEvent(new Event("clips-added"));
    if (answer.status === 202) setTimeout(() => { if (own === asked) load(); }, 1000);
  }

  let typing = null;
  find.addEventListener("submit", (event) => { event.preventDefault(); load(); });
  find.elements.q.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => { page = 1; load(); }, 200); });
  find.elements.show.addEventListener("change", () => { show = null; page = 1; load(); });
  part("buckets").addEventListener("change", () => { part("bucket-keys").hidden = !part("buckets").checked; });
  part("again").addEventListener("click", async () => { await post(`${source}/check?${choices()}`); load(); });
  items.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.page) { page = Number(button.dataset.page); load().then(() => items.scrollIntoView()); }
    if (button.dataset.show !== undefined) { show = button.dataset.show; page = 1; load(); }
    if (button.classList.contains("reconstruct")) reconstruct(button.closest(".item"));
  });

  // Reconstructions -------------------------------------------------------------------------------------------------

  async function reconstruct(figure) {
    explain("");
    const codec = part("codec");
    if (!codec) return explain("No run here has a trained tokenizer.");
    const wanted = { item: figure.dataset.item, run: codec.value, stage: codec.selectedOptions[0].dataset.stage };
    const answer = await post(`${source}/reconstruct`, JSON.stringify(wanted));
    let told = {};
    try { told = await answer.json(); } catch { /* an error page */ }
    if (!answer.ok) return explain(told.error || "This item or tokenizer is gone: reload the page.");
    waiting.set(told.number, { figure, run: wanted.run, name: codec.selectedOptions[0].textContent });
    if (latest) follow(latest);  // its news may have come before the answer
  }

  function showRebuilt({ figure, run, name }, file, text) {
    const caption = `Input beside reconstruction by ${name}, ${text}`;
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "clip rebuilt", title: caption });
    button.setAttribute("aria-label", `${caption}: show it larger`);
    const address = file.split("/").map(encodeURIComponent).join("/");
    Object.assign(button.dataset, { caption, sheet: `/run/${run}/sheet/studio/${address}`, file: `/run/${run}/file/studio/${address}` });
    button.append(document.createElement("canvas"));
    const said = document.createElement("p");
    said.className = "hint";
    said.textContent = caption;
    figure.querySelector(".rebuilding")?.remove();
    const block = document.createElement("div");
    block.className = "rebuilding";
    block.append(button, said);
    figure.querySelector(".pair").after(block);
    document.dispatchEvent(new Event("clips-added"));
  }

  function follow(status) {
    latest = status;
    const busy = status.state === "loading" || status.state === "drawing", said = part("said");
    said.hidden = !busy;
    said.textContent = busy ? `${status.label}: ${status.text || (status.state === "loading" ? "starting" : "working")} …` : "";
    part("model").hidden = !status.model;
    part("model-said").textContent = `${status.label}: ${status.model} stays loaded and holds ${Page.bytes(status.memory)} on ${status.device}.`;
    const job = waiting.get(status.number);
    if (!job || busy) return;
    waiting.delete(status.number);
    if (status.state === "done" && status.files.length) showRebuilt(job, status.files[0], status.text);
    if (status.state === "failed") explain(status.text);
  }

  Page.listen("/draw/live", { drawing: follow });
  part("free").addEventListener("click", () => post("/draw/free"));
  load().catch(() => explain("The page is not reached: is kineo studio still running?"));
})();
