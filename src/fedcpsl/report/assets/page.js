// Draws the page's charts again from its JSON, in the width there is; hovering, legends, sorting, and news of a run.
(() => {
  "use strict";
  const HEIGHT = 300, LEFT = 46, RIGHT = 14, TOP = 26, BOTTOM = 38, DASHES = ["", "7 3", "2 3"], GREY = 8;
  const page = document.documentElement, chosen = {}, off = {};
  let told = JSON.parse(document.getElementById("told").textContent);
  page.classList.add("js");

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  function show(left, top, heading, rows) {
    tip.replaceChildren();
    const first = document.createElement("strong");
    first.textContent = heading;
    tip.append(first);
    for (const [name, value] of rows) {
      const row = document.createElement("div"), a = document.createElement("span"), b = document.createElement("span");
      a.textContent = name;
      b.textContent = value;
      row.append(a, b);
      tip.append(row);
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, left + 16 + box.width > innerWidth ? left - box.width - 12 : left + 16) + "px";
    tip.style.top = Math.max(6, Math.min(top - box.height / 2, innerHeight - box.height - 6)) + "px";
  }

  const hide = () => { tip.hidden = true; };
  const short = (t) => Math.abs(t) < 10000 ? String(+t.toPrecision(6)) : +(t / 1000).toPrecision(6) + "k";
  const written = (chart, v) => chart.log ? String(+v.toPrecision(3)) : v.toFixed(2);

  function scales(chart, width) {
    const log = (v) => chart.log ? Math.log10(Math.max(v, chart.yrange[0])) : v;
    const [x0, x1] = chart.xrange, y0 = log(chart.yrange[0]), y1 = log(chart.yrange[1]);
    return {
      x: (v) => +(LEFT + (v - x0) / (x1 - x0) * (width - LEFT - RIGHT)).toFixed(1),
      y: (v) => +(HEIGHT - BOTTOM - Math.min(Math.max((log(v) - y0) / (y1 - y0), 0), 1) * (HEIGHT - TOP - BOTTOM)).toFixed(1),
      back: (px) => x0 + (px - LEFT) / (width - LEFT - RIGHT) * (x1 - x0),
    };
  }

  function shown(chart) {
    return chart.series.filter((_, i) => !(off[chart.id] || new Set()).has(i)).sort((a, b) => b.colour - a.colour);
  }

  function draw(figure) {
    const chart = told.charts[figure.dataset.chart], svg = figure.querySelector(".plot svg");
    if (!chart || !svg) return;
    const width = Math.max(260, figure.clientWidth), { x, y } = scales(chart, width);
    const band = chart.id in chosen ? chosen[chart.id] : chart.band, parts = [];
    for (const t of chart.yticks) {
      parts.push(`<path class="grid" d="M${LEFT} ${y(t)}H${width - RIGHT}"/>`,
        `<text x="${LEFT - 8}" y="${y(t) + 4}" text-anchor="end">${short(t)}</text>`);
    }
    const every = Math.ceil(chart.xticks.length * 46 / (width - LEFT));
    chart.xticks.forEach((t, i) => {
      if (i % every === 0) parts.push(`<text x="${x(t)}" y="${HEIGHT - BOTTOM + 17}" text-anchor="middle">${short(t)}</text>`);
    });
    parts.push(`<text x="${width - RIGHT}" y="${HEIGHT - 3}" text-anchor="end">${chart.x}</text>`, `<text x="0" y="12">${chart.y}</text>`);
    const lines = shown(chart);
    for (const s of band ? lines : []) {
      const points = s.x.map((v, i) => [v, s.y[i], s[band][i]]).filter((p) => p[2] && s.colour < GREY);
      if (!points.length) continue;
      const upper = points.map(([a, b, h]) => `${x(a)} ${y(b + h)}`);
      const lower = points.map(([a, b, h]) => `${x(a)} ${y(b - h)}`).reverse();
      parts.push(`<path class="band c${s.colour}" d="M${upper.concat(lower).join("L")}Z"/>`);
    }
    for (const s of lines) {
      const points = s.x.map((v, i) => `${x(v)} ${y(s.y[i])}`).join("L");
      parts.push(`<path class="line c${s.colour}" stroke-dasharray="${DASHES[s.dash]}" d="M${points}"/>`);
    }
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("tabindex", "0");
    svg.innerHTML = parts.join("") + '<g class="hover"></g>';
    figure.querySelectorAll("[data-band]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.band === band)));
    figure.querySelectorAll("[data-series]").forEach((b) =>
      b.setAttribute("aria-pressed", String(!(off[chart.id] || new Set()).has(+b.dataset.series))));
  }

  function point(figure, wanted, top) {
    const chart = told.charts[figure.dataset.chart], svg = figure.querySelector(".plot svg"), group = svg.querySelector(".hover");
    const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width, { x, y } = scales(chart, width);
    const lines = shown(chart).filter((s) => s.x.length);
    if (!lines.length || !group) return;
    const near = (s) => s.x.reduce((best, v, i) => Math.abs(v - wanted) < Math.abs(s.x[best] - wanted) ? i : best, 0);
    const at = lines.map((s) => [s, near(s)]);
    const [first, place] = at.reduce((a, b) => Math.abs(b[0].x[b[1]] - wanted) < Math.abs(a[0].x[a[1]] - wanted) ? b : a);
    const here = first.x[place], reach = (chart.xrange[1] - chart.xrange[0]) / 25;
    const rows = at.filter(([s, i]) => Math.abs(s.x[i] - here) <= reach).sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
    group.innerHTML = `<path class="cross" d="M${x(here)} ${TOP}V${HEIGHT - BOTTOM}"/>` + rows.map(([s, i]) =>
      `<circle class="dot c${s.colour}" r="4" cx="${x(s.x[i])}" cy="${y(s.y[i])}"/>`).join("");
    const unit = chart.log ? "" : " %";
    const texts = rows.slice(0, 12).map(([s, i]) => [s.name, written(chart, s.y[i]) + unit
      + (s.seeds[i] ? ` ± ${written(chart, s.seeds[i])}` : "") + (s.devices[i] ? `, spread ${written(chart, s.devices[i])}` : "")]);
    const heading = chart.unit ? `${short(here)}${chart.unit} sent` : `${chart.x} ${short(here)}`;
    figure.dataset.at = here;
    show(box.left + x(here) * box.width / width, top ?? box.top + box.height / 3, heading, texts);
  }

  function leave(figure) {
    const group = figure.querySelector(".hover");
    if (group) group.innerHTML = "";
    hide();
  }

  const figureOf = (event) => event.target.closest?.(".plot svg")?.closest("figure.chart");
  addEventListener("pointermove", (event) => {
    const figure = figureOf(event);
    document.querySelectorAll("figure.chart").forEach((other) => {
      if (other !== figure && other.querySelector(".hover")?.hasChildNodes()) leave(other);
    });
    if (figure) {
      const svg = figure.querySelector(".plot svg"), box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
      point(figure, scales(told.charts[figure.dataset.chart], width).back((event.clientX - box.left) * width / box.width), event.clientY);
      return;
    }
    const named = event.target.closest?.("[title],[data-title]");
    if (!named) return hide();
    if (named.title) {
      named.dataset.title = named.title;
      named.removeAttribute("title");
    }
    const [heading, ...rows] = named.dataset.title.split("; ");
    show(event.clientX, event.clientY, heading, rows.map((text) => [text, ""]));
  });
  addEventListener("keydown", (event) => {
    const figure = figureOf(event), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!figure || !step) return event.key === "Escape" ? hide() : undefined;
    const xs = [...new Set(told.charts[figure.dataset.chart].series.flatMap((s) => s.x))].sort((a, b) => a - b);
    const now = xs.indexOf(+figure.dataset.at);
    point(figure, xs[Math.min(Math.max(now < 0 ? (step < 0 ? xs.length - 1 : 0) : now + step, 0), xs.length - 1)]);
    event.preventDefault();
  });
  addEventListener("focusout", (event) => { const figure = figureOf(event); if (figure) leave(figure); });

  addEventListener("click", (event) => {
    const button = event.target.closest("button"), figure = button?.closest("figure.chart");
    if (figure && "band" in button.dataset) chosen[figure.dataset.chart] = button.dataset.band;
    if (figure && "series" in button.dataset) {
      const hidden = off[figure.dataset.chart] ||= new Set(), i = +button.dataset.series;
      if (!hidden.delete(i)) hidden.add(i);
    }
    if (figure) return draw(figure);
    const heading = event.target.closest(".sorts thead th");
    if (heading) sort(heading);
  });

  function sort(heading) {
    const table = heading.closest("table"), column = heading.cellIndex, body = table.tBodies[0];
    const down = heading.getAttribute("aria-sort") !== "descending";
    const value = (row) => {
      const cell = row.cells[column], text = cell.dataset.v ?? cell.textContent.replace("−", "-").replaceAll(",", "");
      const number = parseFloat(text), unit = { kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }[text.split(" ")[1]] || 1;
      return Number.isNaN(number) ? text : number * unit;
    };
    const rows = [...body.rows].filter((row) => !row.classList.contains("cut")).map((row) => [value(row), row]);
    const rank = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
      : typeof a === typeof b ? String(a).localeCompare(b) : typeof a === "number" ? 1 : -1;
    rows.sort((a, b) => (down ? -1 : 1) * rank(a[0], b[0]));
    body.append(...rows.map(([, row]) => row), ...body.querySelectorAll("tr.cut"));
    table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  }

  const drawAll = () => document.querySelectorAll("figure.chart").forEach(draw);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  addEventListener("toggle", (event) => event.target.querySelectorAll?.("figure.chart").forEach(draw), true);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
  drawAll();

  function news(answer) {
    told = answer.told;
    for (const [id, html] of Object.entries(answer.parts)) {
      const part = document.getElementById(id);
      if (part && part.dataset.had !== html) {
        const open = [...part.querySelectorAll("details")].map((each) => each.open);
        part.innerHTML = html;
        part.querySelectorAll("details").forEach((each, i) => { if (i < open.length) each.open = open[i]; });
        part.dataset.had = html;
      }
    }
    drawAll();
  }

  async function listen() {
    const state = document.querySelector(".state");
    let lost = "";
    try {
      const answer = await fetch("data.json?since=" + encodeURIComponent(told.version), { cache: "no-store" });
      if (answer.status === 200) news(await answer.json());
      else if (answer.status !== 204) lost = (await answer.text()).trim() || answer.statusText;
    } catch {
      lost = "nobody answers any more: fedcpsl watch has ended";
    }
    state.className = lost ? "state lost" : told.over ? "state" : "state on";
    state.lastElementChild.textContent = lost || told.state;
    setTimeout(listen, lost ? 5000 : 1500);
  }
  if (told.live) listen();
})();
