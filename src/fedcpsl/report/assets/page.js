// Tooltips, legends and sorting of the page, and its updates while a run is watched. The charts are drawn already.
(() => {
  "use strict";
  const page = document.documentElement, chosen = {}, hidden = {};
  let data = JSON.parse(document.getElementById("page-data").textContent);
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
  const tickText = (t) => Math.abs(t) < 10000 ? String(+t.toPrecision(6)) : +(t / 1000).toPrecision(6) + "k";
  const valueText = (chart, v) => chart.log ? String(+v.toPrecision(3)) : v.toFixed(2);

  // Where a value is, from the left and from the top, in shares of the plot; as charts.py has drawn it.
  function scales(chart) {
    const log = (v) => chart.log ? Math.log10(Math.max(v, chart.yrange[0])) : v;
    const [x0, x1] = chart.xrange, y0 = log(chart.yrange[0]), y1 = log(chart.yrange[1]);
    return {
      x: (v) => (v - x0) / (x1 - x0),
      y: (v) => 1 - Math.min(Math.max((log(v) - y0) / (y1 - y0), 0), 1),
      back: (share) => x0 + share * (x1 - x0),
    };
  }

  const isHidden = (chart, i) => (hidden[chart.id] || new Set()).has(i);

  // Shows the band and the series that were chosen.
  function update(figure) {
    const chart = data.charts[figure.dataset.chart], plot = figure.querySelector(".plot");
    if (!chart) return;
    if (chart.id in chosen) plot.dataset.band = chosen[chart.id];
    plot.querySelector("svg").setAttribute("tabindex", "0");
    plot.querySelectorAll("[data-series]").forEach((path) => path.classList.toggle("hidden", isHidden(chart, +path.dataset.series)));
    figure.querySelectorAll("button[data-band]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.band === plot.dataset.band)));
    figure.querySelectorAll("button[data-series]").forEach((b) => b.setAttribute("aria-pressed", String(!isHidden(chart, +b.dataset.series))));
  }

  function point(figure, wanted, top) {
    const chart = data.charts[figure.dataset.chart], area = figure.querySelector(".area"), hover = figure.querySelector(".hover");
    const box = area.getBoundingClientRect(), { x, y } = scales(chart);
    const lines = chart.series.filter((s, i) => s.x.length && !isHidden(chart, i));
    if (!lines.length) return;
    const near = (s) => s.x.reduce((best, v, i) => Math.abs(v - wanted) < Math.abs(s.x[best] - wanted) ? i : best, 0);
    const at = lines.map((s) => [s, near(s)]);
    const [first, place] = at.reduce((a, b) => Math.abs(b[0].x[b[1]] - wanted) < Math.abs(a[0].x[a[1]] - wanted) ? b : a);
    const here = first.x[place], reach = (chart.xrange[1] - chart.xrange[0]) / 25;
    const rows = at.filter(([s, i]) => Math.abs(s.x[i] - here) <= reach).sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
    hover.innerHTML = `<i class="cross" style="left:${100 * x(here)}%"></i>` + rows.map(([s, i]) =>
      `<i class="dot c${s.colour}" style="left:${100 * x(s.x[i])}%;top:${100 * y(s.y[i])}%"></i>`).join("");
    const unit = chart.log ? "" : " %";
    const texts = rows.slice(0, 12).map(([s, i]) => [s.name, valueText(chart, s.y[i]) + unit
      + (s.seeds[i] ? ` ± ${valueText(chart, s.seeds[i])}` : "") + (s.devices[i] ? `, spread ${valueText(chart, s.devices[i])}` : "")]);
    const heading = chart.unit ? `${tickText(here)}${chart.unit}` : `${chart.x} ${tickText(here)}`;
    figure.dataset.at = here;
    show(box.left + x(here) * box.width, top ?? box.top + box.height / 3, heading, texts);
  }

  function leave(figure) {
    figure.querySelector(".hover").innerHTML = "";
    hide();
  }

  const figureOf = (event) => event.target.closest?.(".area")?.closest("figure.chart");
  addEventListener("pointermove", (event) => {
    const figure = figureOf(event);
    document.querySelectorAll("figure.chart").forEach((other) => {
      if (other !== figure && other.querySelector(".hover")?.hasChildNodes()) leave(other);
    });
    if (figure) {
      const box = figure.querySelector(".area").getBoundingClientRect();
      point(figure, scales(data.charts[figure.dataset.chart]).back((event.clientX - box.left) / box.width), event.clientY);
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
    const xs = [...new Set(data.charts[figure.dataset.chart].series.flatMap((s) => s.x))].sort((a, b) => a - b);
    const now = xs.indexOf(+figure.dataset.at);
    point(figure, xs[Math.min(Math.max(now < 0 ? (step < 0 ? xs.length - 1 : 0) : now + step, 0), xs.length - 1)]);
    event.preventDefault();
  });
  addEventListener("focusout", (event) => { const figure = figureOf(event); if (figure) leave(figure); });

  addEventListener("click", (event) => {
    const button = event.target.closest("button"), figure = button?.closest("figure.chart");
    if (figure && "band" in button.dataset) chosen[figure.dataset.chart] = button.dataset.band;
    if (figure && "series" in button.dataset) {
      const off = hidden[figure.dataset.chart] ||= new Set(), i = +button.dataset.series;
      if (!off.delete(i)) off.add(i);
    }
    if (figure) return update(figure);
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

  // A round of the reader's choice: its lanes as sections.html draws those of others.
  const made = (name, kind, text = "") => Object.assign(document.createElement(name), { className: kind, textContent: text });
  const at = (kind, left, width) => {
    const mark = made("i", kind);
    mark.style.left = left + "%";
    if (width !== undefined) mark.style.width = width + "%";
    return mark;
  };
  const time = (seconds) => `${+seconds.toPrecision(3)} s`;

  function lane([device, start, download, compute, upload, done, planned, outcome, late], of, length, ends) {
    const [fate, meaning] = of.outcomes[outcome], name = of.names[device] ?? device;
    const bars = made("span", "lane"), words = [`device ${name}: ${meaning}`];
    let now = start;
    for (const [part, seconds] of [["download", download], ["compute", compute], ["upload", upload]]) {
      if (!seconds) continue;
      bars.append(at(part + (part === "upload" && fate !== "counted" ? " failed" : ""), 100 * now / length, 100 * seconds / length));
      words.push(`${part} ${time(seconds)}, from ${time(now)} to ${time(now + seconds)}`);
      now += seconds;
    }
    words.push(`${done} of ${planned} steps`);
    if (late) words.push(`drawn ${late} rounds before`);
    bars.append(...ends());
    bars.title = words.join("; ");
    bars.setAttribute("role", "img");
    bars.setAttribute("aria-label", bars.title);
    const cut = fate === "counted" && done < planned;
    return [made("b", "", name), bars, made("span", "fate " + fate, cut ? `${done} of ${planned} steps` : fate)];
  }

  const picked = {}; // by the figure's place in the page: the chosen round
  const anyRounds = () => [...document.querySelectorAll("figure.any")];
  function drawRound(figure, place) {
    const rounds = JSON.parse(figure.dataset.rounds), [number, range] = figure.querySelectorAll("input");
    const of = { outcomes: JSON.parse(figure.dataset.outcomes), names: JSON.parse(figure.dataset.names) };
    const wanted = picked[place] ?? rounds[0][0];
    const index = rounds.reduce((best, r, i) => Math.abs(r[0] - wanted) < Math.abs(rounds[best][0] - wanted) ? i : best, 0);
    const [round, end, deadline, leftOut, lanes] = rounds[index];
    const length = Math.max(end, deadline, ...lanes.map((l) => l[1] + l[2] + l[3] + l[4])) || 1;
    const ends = () => [...(deadline ? [at("ends deadline", 100 * deadline / length)] : []), at("ends", 100 * end / length)];
    const rows = lanes.map((each) => lane(each, of, length, ends));
    if (leftOut) rows.splice(rows.length / 2, 0, [made("p", "cut", `${leftOut} devices in between`)]);
    const unit = 10 ** Math.floor(Math.log10(length / 5)), step = [1, 2, 5, 10].map((k) => k * unit).find((s) => length / s <= 6);
    const axis = made("span", "seconds");
    axis.setAttribute("aria-hidden", "true");
    for (let k = 0; k * step <= length * 1.0001; k += 1) {
      const mark = at("", 100 * k * step / length);
      mark.textContent = `${+(k * step).toPrecision(6)} s`;
      axis.append(mark);
    }
    figure.querySelector(".lanes").replaceChildren(...rows.flat(), made("b", ""), axis);
    const counted = lanes.filter((l) => of.outcomes[l[7]][0] === "counted").length;
    figure.querySelector("output").textContent = leftOut ? time(end) : `${time(end)}, ${counted} of ${lanes.length} counted`;
    if (document.activeElement !== number) number.value = round;
    range.value = index;
    range.setAttribute("aria-valuetext", `round ${round}`);
  }
  addEventListener("input", (event) => {
    const figure = event.target.closest?.("figure.any"), place = anyRounds().indexOf(figure);
    if (!figure || event.target.value === "") return;
    const chosenOne = event.target.type === "range" ? JSON.parse(figure.dataset.rounds)[event.target.value][0] : +event.target.value;
    picked[place] = chosenOne;
    drawRound(figure, place);
  });
  addEventListener("change", (event) => { // what was typed becomes the round that is shown
    const figure = event.target.closest?.("figure.any");
    if (figure) figure.querySelector("input").value = JSON.parse(figure.dataset.rounds)[figure.querySelector("[type=range]").value][0];
  });

  const updateAll = () => {
    document.querySelectorAll("figure.chart").forEach(update);
    anyRounds().forEach(drawRound);
  };
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
  updateAll();

  function replace(reply) {
    data = reply.data;
    for (const [id, html] of Object.entries(reply.parts)) {
      const part = document.getElementById(id);
      if (part && part.dataset.had !== html) {
        const open = [...part.querySelectorAll("details")].map((each) => each.open);
        part.innerHTML = html;
        part.querySelectorAll("details").forEach((each, i) => { if (i < open.length) each.open = open[i]; });
        part.dataset.had = html;
      }
    }
    updateAll();
  }

  async function poll() {
    const state = document.querySelector(".state");
    let lost = "";
    try {
      const reply = await fetch("data.json?since=" + encodeURIComponent(data.version), { cache: "no-store" });
      if (reply.status === 200) replace(await reply.json());
      else if (reply.status !== 204) lost = (await reply.text()).trim() || reply.statusText;
    } catch {
      lost = "no reply from the server: fedcpsl watch has ended";
    }
    state.className = lost ? "state lost" : data.over ? "state" : "state on";
    state.lastElementChild.textContent = lost || data.state;
    setTimeout(poll, lost ? 5000 : 1500);
  }
  if (data.live) poll();
})();
