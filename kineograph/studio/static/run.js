// A run's page: its head follows the run; other parts are told when something has changed.
"use strict";
(() => {
  const head = document.getElementById("head");
  const page = document.querySelector("[data-run]").dataset, id = page.run;
  let known = page.mark;  // of the files as they were when the page was rendered

  const end = Page.listen(`/run/${id}/live`, {
    change({ html, mark }) {
      const fresh = Page.parse(`<div>${html}</div>`);
      if (fresh.innerHTML.trim() !== head.innerHTML.trim()) head.replaceChildren(...fresh.childNodes);
      Page.showAges();
      if (mark !== known) document.dispatchEvent(new Event("run-changed"));
      known = mark;
    },
    gone() {
      end();
      const said = document.getElementById("live");
      said.hidden = false;
      said.textContent = "This run has been removed.";
    },
  });

  const differences = document.getElementById("differences");
  if (differences) {
    fetch(differences.dataset.source)
      .then((answer) => (answer.ok ? answer.text() : Promise.reject(answer.status)))
      .then((html) => differences.replaceChildren(...Page.parse(`<div>${html}</div>`).childNodes))
      .catch(() => { differences.textContent = "The preset could not be read."; });
  }

  const keys = document.getElementById("key-filter");
  if (keys) {
    const rows = keys.closest("section").querySelectorAll("tbody tr");
    const show = () => {
      const words = keys.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    };
    keys.addEventListener("input", show);
    show();  // something may have been typed already
  }

  const log = document.getElementById("log");
  if (log) {
    log.scrollTop = log.scrollHeight;
    document.addEventListener("run-changed", async () => {
      const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
      const fresh = page.getElementById("log");
      if (fresh && fresh.textContent !== log.textContent) log.replaceChildren(...fresh.childNodes);
      if (atEnd) log.scrollTop = log.scrollHeight;
    });
  }

  const news = document.getElementById("new-samples");
  if (news) {
    // Not their number: of many steps, equally many are shown.
    const list = (page) => [...page.querySelectorAll(".wall .clip")].map((clip) => clip.dataset.sheet).join(" ");
    const known = list(document);
    document.addEventListener("run-changed", async () => {
      const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
      news.hidden = list(page) === known;
    });
  }
})();
