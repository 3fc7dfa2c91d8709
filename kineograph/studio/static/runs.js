// The list of runs: filter, sort, choose for comparison, and follow what changes.
"use strict";
(() => {
  const table = document.getElementById("runs"), body = table.tBodies[0];
  const filter = document.getElementById("filter"), state = document.getElementById("state"), sort = document.getElementById("sort");
  const descending = new Set(["written", "accuracy", "share"]);

  const value = (row, key) => {
    if (key === "name") return row.dataset.name;
    return row.dataset[key] === "" ? null : Number(row.dataset[key]);
  };
  const compare = (a, b) => {
    const key = sort.value, x = value(a, key), y = value(b, key);
    if (x === y) return a.dataset.name < b.dataset.name ? -1 : 1;
    if (x === null || y === null) return x === null ? 1 : -1;  // what is not known comes last
    return (x < y ? -1 : 1) * (descending.has(key) ? -1 : 1);
  };

  function arrange() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...body.rows];
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !(words.every((word) => text.includes(word)) && (!state.value || row.dataset.state === state.value));
      shown += !row.hidden;
    }
    const sorted = [...rows].sort(compare);
    sorted.forEach((row, index) => { if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] || null); });
    table.hidden = shown === 0;
    document.getElementById("no-runs").hidden = rows.length > 0;
    document.getElementById("none-match").hidden = rows.length === 0 || shown > 0;
    choose();
  }

  function choose() {
    const picked = body.querySelectorAll("input:checked");
    const button = document.getElementById("compare-button");
    button.disabled = picked.length < 2 || picked.length > 4;
    button.textContent = picked.length < 2 ? "Compare" : picked.length > 4 ? "Compare: 4 at most" : `Compare ${picked.length}`;
  }

  Page.listen("/live", {
    run({ id, html }) {
      const old = document.getElementById(`run-${id}`);
      const row = Page.parse(`<table><tbody>${html}</tbody></table>`).querySelector("tr");
      if (old) {
        const active = old.contains(document.activeElement) ? document.activeElement.tagName : null;
        row.querySelector("input").checked = old.querySelector("input").checked;
        const picture = old.querySelector("img"), fresh = row.querySelector("img");
        if (picture && fresh && picture.getAttribute("src") === fresh.getAttribute("src")) fresh.replaceWith(picture);  // no flicker
        old.replaceWith(row);
        if (active) row.querySelector(active.toLowerCase())?.focus();
      } else {
        body.append(row);
      }
      arrange();
      Page.showAges();
    },
    gone({ id }) { document.getElementById(`run-${id}`)?.remove(); arrange(); },
  });

  for (const control of [filter, state, sort]) control.addEventListener("input", arrange);
  sort.addEventListener("input", () => Page.remember("sort", sort.value));
  sort.value = Page.recall("sort") || "written";
  if (!sort.value) sort.value = "written";
  body.addEventListener("change", choose);
  arrange();
})();
