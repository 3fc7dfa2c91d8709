// Drawing: sends the form, follows the process that draws, shows what it drew.
"use strict";
(() => {
  const form = document.getElementById("draw");
  if (!form) return;
  const part = (id) => document.getElementById(id);
  const run = form.dataset.run;
  let prime = null, status = null, uploading = false;

  const isStory = () => Boolean(form.elements.story && form.elements.story.value);
  const post = (address, body, type) => fetch(address, { method: "POST", body, headers: type ? { "content-type": type } : {} });

  function explain(text) {
    part("error").hidden = !text;
    part("error").textContent = text || "";
  }

  async function failure(answer) {
    try { return (await answer.json()).error; } catch { return answer.status === 413 ? "The picture is larger than 32 MiB." : `The page answered ${answer.status}.`; }
  }

  function showKind() {
    for (const field of form.querySelectorAll(".only-clips")) field.hidden = isStory();
    for (const field of form.querySelectorAll(".only-story")) field.hidden = !isStory();
    const label = part("prompts-label");
    label.textContent = isStory() ? label.dataset.story : label.dataset.clips;
  }
  form.addEventListener("change", showKind);
  showKind();

  // The form --------------------------------------------------------------------------------------------------------

  function read() {
    const value = (name) => (form.elements[name] && form.elements[name].value !== "" ? form.elements[name].value : null);
    const number = (name) => (value(name) === null ? null : Number(value(name)));
    const wanted = {
      prompts: form.elements.prompts.value.split("\n").map((line) => line.trim()).filter(Boolean),
      story: isStory(), stage: value("stage"), checkpoint: value("checkpoint"), ema: value("ema") !== null,
      seed: number("seed"), negative: value("negative"), guidance: number("guidance"), steps: number("steps"), frames: number("frames"), prime,
    };
    return isStory() ? { ...wanted, overlap: number("overlap") } : { ...wanted, count: number("count"), size: value("size") };
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (uploading) return explain("The picture is still being read: try again in a moment.");
    explain("");
    const answer = await post(`/run/${run}/draw`, JSON.stringify(read()), "application/json");
    if (!answer.ok) explain(await failure(answer));
  });
  form.elements.prompts.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
  });
  part("cancel").addEventListener("click", () => post("/draw/cancel"));
  part("free").addEventListener("click", () => post("/draw/free"));

  part("prime").addEventListener("change", async () => {
    const file = part("prime").files[0], said = part("prime-said");
    prime = null;
    said.hidden = true;
    explain("");
    if (!file) return;
    uploading = true;
    try {
      const answer = await post(`/run/${run}/upload`, file, "application/octet-stream");
      if (answer.ok) {
        const picture = await answer.json();
        prime = picture.name;
        said.hidden = false;
        said.textContent = `${picture.width} × ${picture.height} pixels`;
      } else {
        part("prime").value = "";
        explain(await failure(answer));
      }
    } catch {
      part("prime").value = "";
      explain("The picture could not be sent: it may be larger than 32 MiB.");
    } finally {
      uploading = false;
    }
  });

  // What happens ----------------------------------------------------------------------------------------------------

  async function showDrawings() {
    const answer = await fetch(`/run/${run}/drawings`);
    if (!answer.ok) return;
    const fresh = Page.parse(`<div>${await answer.text()}</div>`);
    const known = new Map([...document.querySelectorAll(".drawing")].map((item) => [item.querySelector(".clip").dataset.file, item]));
    const items = [...fresh.childNodes].map((item) => (item.querySelector && known.get(item.querySelector(".clip")?.dataset.file)) || item);  // those that play go on
    part("drawings").replaceChildren(...items);
    document.dispatchEvent(new Event("clips-added"));
  }

  function show() {
    const busy = status.state === "loading" || status.state === "drawing", own = status.run === run;
    part("go").disabled = busy;
    part("cancel").hidden = !busy;
    part("progress").hidden = !busy;
    const bar = part("progress-bar"), seconds = Page.duration(Date.now() / 1000 - status.began);
    const passes = status.passes ? `${status.passes}${status.expected ? ` of ${status.expected}` : ""} passes through the network` : "";
    const words = [own ? "" : `${status.label}:`, status.text || (status.state === "loading" ? "starting" : "drawing"), passes, seconds];
    part("progress-said").textContent = words.filter(Boolean).join(" · ");
    if (status.state === "drawing" && status.expected) { bar.max = status.expected; bar.value = Math.min(status.passes, status.expected); } else bar.removeAttribute("value");
    part("model").hidden = !status.model;
    part("model-said").textContent = `${own ? "" : `${status.label}: `}${status.model} stays loaded for the next drawing and holds ${Page.bytes(status.memory)} on ${status.device}.`;
    part("ended").hidden = !(own && status.state === "cancelled");
    if (own && status.state === "failed") explain(status.text);
  }

  Page.listen("/draw/live", {
    drawing(fresh) {
      // A short drawing may be done before any other news of it.
      const finished = status && fresh.state === "done" && (status.number !== fresh.number || status.state !== "done");
      status = fresh;
      show();
      if (finished && fresh.run === run) { explain(""); showDrawings(); }
    },
  });
  setInterval(() => { if (status && (status.state === "loading" || status.state === "drawing")) show(); }, 1000);
})();
