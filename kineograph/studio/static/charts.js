// Curves with uPlot: panels of one stage of a run, or of several runs over each other.
"use strict";
(() => {
  const charts = document.getElementById("charts");
  if (!charts) return;
  const COLOURS = 8;
  const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));  // between ticks
  const embedded = document.getElementById("curves-data");  // in a report
  const runs = charts.dataset.runs ? JSON.parse(charts.dataset.runs) : null;
  const names = charts.dataset.names ? JSON.parse(charts.dataset.names) : [""];
  const control = (id) => document.getElementById(id);
  const checked = (name) => document.querySelector(`input[name="${name}"]:checked`);
  let loaded = [];  // of each run: its stages
  let plots = [];
  let zoom = null;  // [from, to] on the horizontal axis

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
    return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
  };

  // Ticks of one axis look alike, and fit beside it.
  function formatTicks(ticks) {
    const largest = Math.max(...ticks.map((tick) => Math.abs(tick ?? 0)));
    return ticks.map((tick) => {
      if (tick === null) return "";
      if (largest >= 1e15 && tick !== 0) return tick.toExponential().replace(/(\.\d{3})\d+/, "$1"); // diverged
      if (largest >= 1e5) return tick.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 });
      if (largest >= 1e-4 || tick === 0) return tick.toLocaleString("en-US", { maximumSignificantDigits: 4 });
      return tick.toExponential().replace(/(\.\d{3})\d+/, "$1");
    });
  }

  // 1, 2 … 9, 10, 20 … between two values; uPlot would count from the lower one.
  function logTicks(low, high) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (let digit = 1; digit < 10; digit++) ticks.push(Number(`${digit}e${power}`));
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  }

  // Data ------------------------------------------------------------------------------------------------------------

  // Exponential moving average without the bias of its start.
  function smooth(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // Lowest and highest of what is drawn; `clip`: from the 1st to the 99th percentile. null: leave the axis to uPlot.
  function findRange(arrays, clip) {
    const all = arrays.flat().filter((v) => v !== null && v !== undefined && Number.isFinite(v)).sort((a, b) => a - b);
    const share = clip && all.length >= 20 ? 0.01 : 0;
    const low = all[Math.floor(share * (all.length - 1))], high = all[Math.ceil((1 - share) * (all.length - 1))];
    return high > low ? [low, high] : null;
  }

  function options() {
    const axis = checked("axis");
    return { axis: axis ? axis.value : "step", log: control("log").checked, clip: control("clip").checked, smooth: Number(control("smooth").value) };
  }

  // Curves of a panel, one entry for each run and curve.
  function collect(title, stageName) {
    const found = [];
    loaded.forEach((stages, run) => {
      const stage = stages.find((item) => item.name === stageName);
      const panel = stage && stage.panels.find((item) => item.title === title);
      if (panel) panel.curves.forEach((curve, index) => found.push({ run, stage, panel, curve, index, columns: stage.splits[curve.split] }));
    });
    return found;
  }

  // One run: a colour for each kind of number, or for training and validation. Several: a colour for each run.
  function style(item, entries) {
    const validation = item.curve.split === "validation";
    if (loaded.length > 1) {
      return { stroke: colour(`--c${(item.run % COLOURS) + 1}`), width: validation ? 2.25 : 1, dash: item.index > 1 ? [5, 4] : undefined };
    }
    const kinds = [...new Set(entries.map((entry) => entry.curve.label))];
    const place = kinds.length <= 2 && kinds.every((kind) => kind === "train" || kind === "validation") ? (validation ? 1 : 0) : kinds.indexOf(item.curve.label);
    return { stroke: colour(`--c${(place % COLOURS) + 1}`), width: validation ? 2.25 : 1 };
  }

  // Drawing ---------------------------------------------------------------------------------------------------------

  const MARK = { save: "--muted", resume: "--c4", skipped: "--c5", warning: "--wait", fatal: "--bad" };

  function drawMarks(plot, stage, axis) {
    if (loaded.length > 1) return;
    const { ctx, bbox } = plot;
    const train = stage.splits.train;
    ctx.save();
    for (const mark of stage.marks) {
      let x = mark.step;
      if (axis === "minutes") {
        const place = train.step.findIndex((step) => step >= mark.step);
        x = train.minutes[place < 0 ? train.minutes.length - 1 : place];
      }
      if (x === null || x === undefined || x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const left = Math.round(plot.valToPos(x, "x", true)) + 0.5;
      ctx.fillStyle = ctx.strokeStyle = colour(MARK[mark.kind] || "--muted");
      if (mark.kind === "save") {  // a tick at the foot: saves are many
        ctx.globalAlpha = 0.8;
        ctx.fillRect(left - 1, bbox.top + bbox.height - 6 * devicePixelRatio, 2 * devicePixelRatio, 6 * devicePixelRatio);
        continue;
      }
      ctx.globalAlpha = 0.9;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function describe(entries, values, at, place) {
    const parts = entries.map((item, index) => {
      const data = values[index + 1];
      let value = at === null ? null : data[at];
      if (at === null || value === null || value === undefined) {
        for (let row = at === null ? data.length - 1 : at; row >= 0 && (value === null || value === undefined); row--) value = data[row];
      }
      const part = document.createElement("span"), line = document.createElement("i");
      const { stroke, width, dash } = style(item, entries);
      line.style.borderColor = stroke;
      line.className = [width < 2 ? "thin" : "", dash ? "dashed" : ""].join(" ");
      const label = loaded.length > 1 ? `${names[item.run]}, ${item.curve.label}` : item.curve.label;
      part.append(line, `${label} ${number(value)}`);
      return part;
    });
    place.replaceChildren(...parts);
  }

  function draw(panel, stageName, grid) {
    const { axis, log, clip, smooth: weight } = options();
    const entries = collect(panel.title, stageName).filter((item) => item.columns.step.length);
    if (!entries.length) return;
    let logarithmic = log && panel.log;
    const tables = entries.map((item) => {
      const xs = item.columns[axis];
      let ys = item.columns.values[item.curve.name];
      if (logarithmic) ys = ys.map((value) => (value !== null && value > 0 ? value : null));
      if (weight > 0 && item.curve.split === "train") ys = smooth(ys, weight);
      const rows = xs.map((x, index) => [x, ys[index]]).filter(([x]) => x !== null);
      return [rows.map(([x]) => x), rows.map(([, y]) => y)];
    });
    const data = uPlot.join(tables);

    const figure = document.createElement("figure");
    figure.className = "chart";
    const caption = document.createElement("figcaption"), title = document.createElement("b"), at = document.createElement("span");
    title.textContent = panel.title;
    at.className = "muted";
    caption.append(title, at);
    const place = document.createElement("div"), values = document.createElement("div");
    place.className = "plot";
    values.className = "values";
    figure.append(caption, place, values);
    grid.append(figure);

    let range = findRange(data.slice(1), clip);
    if (range && range[0] > 0 && range[1] / range[0] < 2.5) logarithmic = false;  // too narrow for its ticks
    if (range && logarithmic) range = [range[0] / 1.08, range[1] * 1.08];
    else if (range && clip) range = [range[0] - 0.05 * (range[1] - range[0]), range[1] + 0.05 * (range[1] - range[0])];
    else range = null;
    const axes = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot({
      width: place.clientWidth || 360,
      height: place.clientHeight || 190,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "charts", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 5 } },
      scales: { x: { time: false, range: (u, low, high) => zoom || (low === high ? [low - 1, high + 1] : [low, high]) }, y: { distr: logarithmic ? 3 : 1, ...(range ? { range: () => range } : {}) } },
      axes: [
        { ...axes, size: 26, values: (u, ticks) => formatTicks(ticks), ...(axis === "step" ? { incrs: WHOLE } : {}) },
        { ...axes, size: 56, values: (u, ticks) => formatTicks(ticks), ...(logarithmic && range ? { splits: (u, place, low, high) => logTicks(low, high) } : {}) },
      ],
      series: [{}, ...entries.map((item) => ({ ...style(item, entries), spanGaps: true, points: { show: item.columns.step.length < (item.curve.split === "validation" ? 24 : 2), size: 5 } }))],
      hooks: {
        draw: [(u) => drawMarks(u, entries[0].stage, axis)],
        setCursor: [(u) => {
          const index = u.cursor.idx;
          at.textContent = index === null || index === undefined ? "" : axis === "step" ? `step ${number(u.data[0][index])}` : `minute ${u.data[0][index].toFixed(1)}`;
          describe(entries, u.data, index ?? null, values);
        }],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          zoom = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          for (const other of plots) other.redraw(true, true), other.setScale("x", { min: zoom[0], max: zoom[1] });
        }],
      },
    }, data, place);
    place.addEventListener("dblclick", () => { zoom = null; show(); });
    describe(entries, data, null, values);
    figure.setAttribute("aria-label", `${panel.title}: ${[...values.children].map((part) => part.textContent).join(", ")}`);
    plots.push(plot);
    new ResizeObserver(() => { if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: place.clientHeight }); }).observe(place);
  }

  function show() {
    const chosen = checked("stage");
    const stageName = chosen ? chosen.value : loaded[0]?.[0]?.name;
    const top = document.documentElement.scrollTop;
    const height = charts.offsetHeight;
    charts.style.minHeight = `${height}px`;  // no jump while charts are replaced
    for (const plot of plots) plot.destroy();
    plots = [];
    const panels = [];
    for (const stages of loaded) {
      for (const panel of stages.find((item) => item.name === stageName)?.panels || []) {
        if (!panels.some((known) => known.title === panel.title)) panels.push(panel);
      }
    }
    charts.replaceChildren();
    for (const panel of panels) draw(panel, stageName, charts);
    charts.style.minHeight = "";
    document.documentElement.scrollTop = top;
    document.getElementById("no-curves").hidden = panels.length > 0;
    charts.hidden = panels.length === 0;
    listMarks(loaded.length === 1 ? loaded[0].find((item) => item.name === stageName) : null);
  }

  function listMarks(stage) {
    const section = document.getElementById("marks");
    if (!section) return;
    section.hidden = !stage || !stage.marks.length;
    if (section.hidden) return;
    section.querySelector("ol").replaceChildren(...stage.marks.map((mark) => {
      const item = document.createElement("li");
      for (const [kind, text] of [["step", mark.step.toLocaleString("en-US")], [`mark ${mark.kind}`, mark.kind], ["text", mark.text]]) {
        const part = document.createElement("span");
        part.className = kind;
        part.textContent = text;
        item.append(part);
      }
      return item;
    }));
  }

  // Loading ---------------------------------------------------------------------------------------------------------

  async function load() {
    if (embedded) {
      loaded = JSON.parse(embedded.textContent);
    } else {
      const sources = runs ? runs.map((id) => `/run/${id}/curves.json`) : [charts.dataset.source];
      const answers = await Promise.all(sources.map((source) => fetch(source)));
      if (answers.some((answer) => !answer.ok)) return;
      loaded = await Promise.all(answers.map((answer) => answer.json()));
    }
    if (runs || embedded) offerStages();
    show();
  }

  // A comparison offers the stages that several runs have.
  function offerStages() {
    const choice = document.getElementById("stage-choice");
    if (!choice || choice.querySelector("input")) return;
    const drawn = loaded.map((stages) => stages.filter((stage) => stage.panels.length).map((stage) => stage.name));
    const all = [...new Set(drawn.flat())];
    const shared = all.filter((name) => drawn.filter((own) => own.includes(name)).length > 1 || loaded.length === 1);
    (shared.length ? shared : all).forEach((name, index, list) => {
      const label = document.createElement("label"), input = document.createElement("input"), text = document.createElement("span");
      Object.assign(input, { type: "radio", name: "stage", value: name, checked: index === list.length - 1 });
      text.textContent = name;
      label.append(input, text);
      choice.append(label);
    });
    choice.hidden = all.length < 2;
  }

  let waiting = false;
  document.addEventListener("run-changed", () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => { waiting = false; load().catch(() => {}); }, 2000);
  });
  const panel = document.getElementById("chart-controls");
  const remembered = { log: "checked", clip: "checked", smooth: "value" };
  if (!embedded) {
    for (const [id, property] of Object.entries(remembered)) {
      const value = Page.recall(`charts.${id}`);
      if (value !== null) control(id)[property] = property === "checked" ? value === "true" : value;
    }
  }
  panel.addEventListener("input", (event) => {
    if (!embedded && event.target.id in remembered) Page.remember(`charts.${event.target.id}`, event.target[remembered[event.target.id]]);
    if (event.target.name === "axis" || event.target.name === "stage") zoom = null;
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  load().catch(() => { document.getElementById("no-curves").hidden = false; });
})();
