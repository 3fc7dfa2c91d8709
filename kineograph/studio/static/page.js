// What every page shares: ages that stay true, the key "/" for the filter, a connection that tells when it is lost.
"use strict";

const Page = {
  duration(seconds) {
    const s = Math.max(0, Math.round(seconds));
    const pad = (n) => String(n).padStart(2, "0");
    if (s >= 86400) return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
    if (s >= 3600) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} min`;
    return s >= 60 ? `${Math.floor(s / 60)} min ${pad(s % 60)} s` : `${s} s`;
  },

  // One unit: more would change under the reader's eyes.
  age(seconds) {
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    return s < 2 * 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
  },

  bytes: (size) => (size >= 2 ** 30 ? `${(size / 2 ** 30).toFixed(1)} GiB` : `${Math.round(size / 2 ** 20)} MiB`),

  showAges() {
    for (const time of document.querySelectorAll("time[data-written]")) {
      const text = `${Page.age(Date.now() / 1000 - Number(time.dataset.written))} ago`;
      if (time.textContent !== text) time.textContent = text;
    }
  },

  // Server-sent events; a lost connection is retried by the browser, and said. Returns a function that ends them.
  listen(address, handlers) {
    const said = document.getElementById("live");
    let source = null, ended = false;
    const open = () => {
      source = new EventSource(address);
      source.onopen = () => { said.hidden = true; };
      source.onerror = () => { said.hidden = false; said.textContent = "Not connected: is kineo studio still running?"; };
      for (const [name, handle] of Object.entries(handlers)) source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    };
    const follow = () => {  // a hidden page needs no news; browsers allow few connections
      if (document.hidden && source) { source.close(); source = null; }
      if (!document.hidden && !source && !ended) open();
    };
    document.addEventListener("visibilitychange", follow);
    window.addEventListener("pagehide", () => { if (source) source.close(); source = null; });
    window.addEventListener("pageshow", follow);
    follow();
    return () => { ended = true; source?.close(); source = null; };
  },

  // A piece of HTML that the server rendered, and escaped.
  parse(html) {
    const template = document.createElement("template");
    template.innerHTML = html.trim();
    return template.content.firstElementChild;
  },

  remember(key, value) { try { localStorage.setItem(`kineo.${key}`, value); } catch { /* private window */ } },
  recall(key) { try { return localStorage.getItem(`kineo.${key}`); } catch { return null; } },
};

Page.showAges();
setInterval(Page.showAges, 1000);
document.addEventListener("keydown", (event) => {
  const search = document.querySelector("input[type=search]");
  const types = event.target.closest("input:not([type=checkbox], [type=radio], [type=range]), textarea, select");
  if (event.key === "/" && search && !types) { event.preventDefault(); search.focus(); }
  if (event.key === "Escape" && event.target === search) { search.value = ""; search.dispatchEvent(new Event("input")); search.blur(); }
});
document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } catch {  // no permission, or an address that is neither local nor https
    getSelection().selectAllChildren(code);
  }
});
