"use strict";
// Draws the charts from the data in the page. Nothing here asks for anything outside of it.
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const coarse = matchMedia("(pointer: coarse)");
  const hidden = new Set();
  const state = new Map(); // chart name -> { view, scale, across, place, row }
  const charts = new Map(data.charts.map((chart) => [chart.name, chart]));
  // Nothing leaves the page: plotly's toolbar, whose buttons change with its versions, is replaced by the page's own.
  const config = {
    responsive: true, displayModeBar: false, displaylogo: false, doubleClick: "reset",
    showSendToCloud: false, showEditInChartStudio: false, showLink: false, sendData: false, plotlyServerURL: "",
  };
  const element = (name) => document.getElementById("chart-" + name);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const current = (chart) => chart.views[state.get(chart.name).view];
  const scaleOf = (chart) => {
    const view = current(chart), chosen = state.get(chart.name).scale;
    if (chosen && (chosen !== "stretched" || view.stretch)) return chosen;
    return view.stretched ? "stretched" : view.layout.yaxis.type || "linear";
  };
  const acrossOf = (chart) => state.get(chart.name).across || current(chart).layout.xaxis.type || "linear";
  const isHeat = (view) => view.traces[0].type === "heatmap";
  const numbers = (traces, which) => traces.flatMap((trace) => trace[which]).filter((each) => typeof each === "number");
  const isShown = (trace) => !hidden.has(trace.legendgroup);
  const plain = (text) => new DOMParser().parseFromString(text, "text/html").body.textContent;

  // Text in a line's colour, mixed with that of the page until it can be read on its ground.
  function readable(line) {
    const parts = (hex) => [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
    const text = parts(color("--text"));
    return "rgb(" + parts(line).map((part, place) => Math.round(0.6 * part + 0.4 * text[place])).join(",") + ")";
  }

  const canvas = document.createElement("canvas").getContext("2d");
  function shortened(text, room) {
    if (canvas.measureText(text).width <= room) return text;
    let length = text.length;
    while (length > 1 && canvas.measureText(text.slice(0, length) + "…").width > room) length -= 1;
    return text.slice(0, length) + "…";
  }

  // What stands at the right ends of lines: trace -> name and last value, in the room that the chart can spare.
  function endings(view, width) {
    const found = new Map();
    canvas.font = (narrow.matches ? "12px" : "600 13px") + " system-ui, sans-serif";
    for (const trace of view.traces) {
      if (!trace.meta || !trace.meta.end || !isShown(trace)) continue;
      const value = narrow.matches || !trace.meta.value ? "" : " " + trace.meta.value;
      const name = shortened(plain(trace.meta.end), 0.28 * width - canvas.measureText(value).width);
      found.set(trace, { text: name + value, width: canvas.measureText(name + value).width });
    }
    return found;
  }

  const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // Labels at the ends, moved apart where lines end close together.
  function endLabels(drawn, view, ends) {
    const { xaxis, yaxis, _size: size } = drawn._fullLayout;
    const columns = new Map();
    drawn.data.forEach((trace, place) => {
      const end = ends.get(view.traces[place]);
      if (!end) return;
      let last = trace.y.length - 1;
      while (last >= 0 && (trace.y[last] === null || trace.x[last] === null)) last -= 1;
      if (last < 0) return;
      const height = yaxis.d2p(trace.y[last]);
      if (!(height >= -1 && height <= size.h + 1)) return; // zoomed away
      const at = xaxis.d2p(trace.x[last]);
      if (at > size.w + 1) return;
      const key = Math.round(at);
      if (!columns.has(key)) columns.set(key, []);
      columns.get(key).push({ ...end, at, height, color: trace.line.color, strong: trace.line.width > 3 });
    });
    const labels = [];
    for (const column of columns.values()) {
      column.sort((one, other) => one.height - other.height);
      const gap = Math.min(16, size.h / Math.max(1, column.length - 1));
      if (gap < 11) continue; // too many to read; the legend has them
      column.forEach((each, place) => {
        if (place) each.height = Math.max(each.height, column[place - 1].height + gap);
      });
      let limit = size.h;
      for (const each of column.reverse()) {
        each.height = Math.min(each.height, limit);
        limit = each.height - gap;
      }
      for (const each of column) {
        labels.push({
          text: each.strong ? "<b>" + escape(each.text) + "</b>" : escape(each.text), showarrow: false, xref: "paper",
          yref: "paper", x: each.at / size.w, xshift: 10, xanchor: "left", y: 1 - each.height / size.h, yanchor: "middle",
          align: "left", font: { color: readable(each.color), size: narrow.matches ? 12 : 13 },
        });
      }
    }
    return labels;
  }

  // The part beyond the training length: shaded, and named above the chart.
  function beyond(view, across, range) {
    const place = (length) => across === "log" ? Math.log10(length) : length;
    const inside = (view.trained || []).filter((length) => place(length) >= range[0] && place(length) <= range[1]);
    const shapes = inside.map((length) => ({
      type: "line", x0: length, x1: length, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", width: 1.5, color: color("--quiet") },
    }));
    const named = (length, text, anchor) => ({
      text, showarrow: false, x: place(length), xanchor: anchor, yref: "paper", y: 1, yanchor: "bottom",
      font: { size: 12, color: color("--quiet") },
    });
    const longest = inside[inside.length - 1];
    const notes = inside.slice(0, -1).map((length) => named(length, "L = " + length.toLocaleString("en"), "center"));
    if (longest !== undefined && place(longest) < range[1] - 0.05 * (range[1] - range[0])) {
      const end = across === "log" ? 10 ** range[1] : range[1];
      shapes.push({
        type: "rect", x0: longest, x1: end, yref: "paper", y0: 0, y1: 1, layer: "below", line: { width: 0 },
        fillcolor: color("--beyond"),
      });
      const several = inside.length > 1 ? "longer than any was trained at (" : "longer than trained (";
      const full = several + longest.toLocaleString("en") + " tokens) →";
      notes.push(named(longest, narrow.matches ? "longer than trained →" : full, "left"));
    }
    return { shapes, notes };
  }

  // Across, all lengths stay; upward, lines that are switched off make room for the others.
  function rangeOf(view, which, kind) {
    const drawable = (traces) => numbers(traces, which).filter((each) => kind !== "log" || each > 0);
    const shown = which === "y" ? drawable(view.traces.filter(isShown)) : [];
    const known = shown.length ? shown : drawable(view.traces);
    const [low, high] = [Math.min(...known), Math.max(...known)].map((each) => kind === "log" ? Math.log10(each) : each);
    const room = 0.035 * (high - low || 1);
    return [low - room, high + room];
  }

  // Of the marks across, as many as have room, the last one among them.
  function fewer(axis, room) {
    const place = (value) => axis.type === "log" ? Math.log10(value) : value;
    const kept = [];
    for (let tick = axis.tickvals.length - 1; tick >= 0; tick -= 1) {
      const at = place(axis.tickvals[tick]) / (axis.range[1] - axis.range[0]) * room;
      const width = 7 * axis.ticktext[tick].length + 10;
      if (kept.length && kept[0].at - at < (width + kept[0].width) / 2) continue;
      kept.unshift({ tick, at, width });
    }
    axis.tickvals = kept.map(({ tick }) => axis.tickvals[tick]);
    axis.ticktext = kept.map(({ tick }) => axis.ticktext[tick]);
  }

  function layoutOf(chart, ends) {
    const view = current(chart), layout = view.layout, scale = scaleOf(chart), across = acrossOf(chart);
    const themed = (given) => ({
      gridcolor: color("--line"), zeroline: false, linecolor: color("--quiet"), automargin: true, ...given,
      title: { ...given.title, standoff: 10 },
    });
    const x = themed(layout.xaxis), y = themed(layout.yaxis);
    let marks = { shapes: [], notes: [] };
    if (!isHeat(view)) {
      x.type = across;
      y.type = scale === "log" ? "log" : "linear";
      if (y.type === "log") {
        delete y.rangemode;
        if (y.tickmode !== "array") Object.assign(y, { range: rangeOf(view, "y", "log") }, logTicks(...rangeOf(view, "y", "log")));
      }
      if (scale === "stretched") {
        const top = Math.max(1, ...numbers(view.traces.filter(isShown), "y").map(height(view.stretch)));
        y.range = [-0.04 * top, 1.05 * top];
        Object.assign(y, { tickmode: "array", tickvals: view.stretch.ticks.map(height(view.stretch)) });
        y.ticktext = view.stretch.ticks.map((each) => each.toLocaleString("en"));
      }
      x.range = rangeOf(view, "x", across);
      if (across === "log" && x.tickmode !== "array") Object.assign(x, logTicks(...x.range));
      marks = beyond(view, across, x.range);
      Object.assign(x, { spikecolor: color("--quiet"), spikethickness: 1, spikedash: "solid", hoverformat: ",.4~r" });
      x.unifiedhovertitle = { text: plain(layout.xaxis.title.text) + ": %{x:,.4~r}" };
      if (x.type === "linear" && x.tickmode === "array") { delete x.tickmode; delete x.tickvals; delete x.ticktext; }
    }
    const rows = view.traces.filter((trace) => trace.showlegend !== false && !trace.meta).length;
    const room = Math.max(0, ...[...ends.values()].map((end) => end.width));
    const showlegend = !ends.size && rows > 1;
    const tall = narrow.matches ? 360 + (showlegend ? 20 * rows : 0) : 430; // on a phone a legend has a row a line
    if (x.tickmode === "array" && x.range) fewer(x, element(chart.name).clientWidth - room - 80);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", separators: ".,",
      font: { color: color("--text"), family: "system-ui, sans-serif", size: narrow.matches ? 12 : 13 },
      margin: { l: 56, r: 16 + (room ? room + 6 : 0), t: marks.notes.length ? 26 : 12, b: 48 },
      hovermode: isHeat(view) ? "closest" : "x unified", hoversort: "value ascending", hoverdistance: 60,
      hoverlabel: { namelength: -1, bgcolor: color("--ground"), bordercolor: color("--line"), font: { color: color("--text"), size: 13 } },
      dragmode: coarse.matches ? false : "zoom", // a finger scrolls the page
      showlegend,
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.06, yanchor: "bottom" },
      ...layout, height: layout.height || tall, xaxis: x, yaxis: y, shapes: marks.shapes,
      annotations: marks.notes,
    };
  }

  // Round numbers for a logarithmic axis, as many as make it readable, in full.
  function logTicks(low, high) {
    for (const steps of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 6, 8], [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9]]) {
      const found = [];
      for (let power = Math.floor(low); power <= high; power += 1) {
        found.push(...steps.map((each) => each * 10 ** power).filter((each) => Math.log10(each) >= low && Math.log10(each) <= high));
      }
      if (found.length > 3 || steps.length > 6) {
        const shown = found.map((each) => each.toLocaleString("en", { maximumSignificantDigits: 3 }));
        return { tickmode: "array", tickvals: found, ticktext: shown };
      }
    }
  }

  const height = ({ floor, width }) => (value) => value === null ? null : Math.asinh((value / floor - 1) / width);

  function tracesOf(chart) {
    const view = current(chart), scale = scaleOf(chart);
    return view.traces.map((trace) => {
      const drawn = { ...trace, visible: isShown(trace) ? true : "legendonly" };
      if (trace.type === "heatmap") {
        const ends = [color("--skip-none"), color("--skip-all")];
        const [low, high] = trace.reversescale ? ends.reverse() : ends;
        const gap = Math.min(trace.xgap, Math.floor(element(chart.name).clientWidth / trace.x.length / 10)); // many columns touch
        Object.assign(drawn, { reversescale: false, colorscale: [[0, low], [1, high]], xgap: gap });
        if (trace.texttemplate && narrow.matches) {
          Object.assign(drawn, trace.x.length > 8 ? { texttemplate: "" } : { textfont: { size: 9 } });
        }
      }
      if (scale === "stretched") drawn.y = trace.y.map(height(view.stretch));
      return drawn;
    });
  }

  async function draw(chart) {
    const target = element(chart.name), view = current(chart);
    const ends = isHeat(view) ? new Map() : endings(view, target.clientWidth);
    const layout = layoutOf(chart, ends);
    target.style.height = layout.height + "px";
    const caption = target.closest("figure").querySelector("figcaption");
    const said = chart.captions[state.get(chart.name).view] || caption.textContent;
    target.setAttribute("aria-label", target.getAttribute("aria-label").replace(caption.textContent, () => said));
    caption.textContent = said;
    const drawn = await Plotly.react(target, tracesOf(chart), layout, config);
    const fit = () => {
      if (ends.size) Plotly.relayout(drawn, { annotations: [...layout.annotations, ...endLabels(drawn, view, ends)] });
    };
    target.fit = fit;
    fit();
    for (const part of target.querySelectorAll("svg")) part.setAttribute("aria-hidden", "true");
    if (!target.watched) {
      target.watched = true;
      drawn.on("plotly_relayout", (change) => {
        if ("annotations" in change) return;
        const zoomed = Object.keys(change).some((key) => key.includes("range["));
        document.querySelector(`button[data-reset="${chart.name}"]`).hidden = !zoomed;
        target.fit();
      });
    }
    document.querySelector(`button[data-reset="${chart.name}"]`).hidden = true;
    return drawn;
  }

  // The arrow keys go from place to place: the tooltip shows it, and a screen reader says it.
  function step(chart, by) {
    const target = element(chart.name), view = current(chart), now = state.get(chart.name);
    if (isHeat(view)) return stepHeat(target, view, now, by);
    const shown = view.traces.filter((trace) => isShown(trace) && trace.hoverinfo !== "skip");
    if (!shown.length) return;
    const places = [...new Set(shown.flatMap((trace) => trace.x))].filter((each) => each !== null).sort((a, b) => a - b);
    now.place = within(now.place + by[0], places.length);
    const x = places[now.place];
    const here = shown.map((trace) => ({ trace, point: trace.x.indexOf(x) })).filter(({ point }) => point >= 0);
    Plotly.Fx.hover(target, { xval: x });
    const said = here.map(({ trace, point }) => plain(trace.name) + " " + (trace.text ? trace.text[point] : trace.y[point]));
    say(x.toLocaleString("en") + ": " + said.join(", "));
  }

  // In a heat map, from cell to cell.
  function stepHeat(target, view, now, by) {
    const [{ x, y, z, colorbar }] = view.traces, { xaxis, yaxis } = view.layout;
    now.place = within(now.place + by[0], x.length);
    now.row = within(now.row + by[1], y.length);
    Plotly.Fx.hover(target, [{ curveNumber: 0, pointNumber: [now.row, now.place] }]);
    const value = z[now.row][now.place];
    const shown = colorbar.tickformat.includes("%") ? (100 * value).toFixed(1) + "%" : Math.round(value).toLocaleString("en");
    say(`${yaxis.title.text} ${y[now.row]}, ${xaxis.title.text} ${x[now.place]}: ${shown}`);
  }

  const within = (place, count) => Math.min(count - 1, Math.max(0, place));
  const say = (text) => { document.getElementById("said").textContent = text; };

  function switched(name, shown) {
    if (shown) hidden.delete(name); else hidden.add(name);
    for (const chart of data.charts) {
      if (chart.views.some((view) => view.traces.some((trace) => trace.legendgroup === name))) draw(chart);
    }
  }

  function download(name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([data.tables[name]], { type: "text/csv;charset=utf-8" }));
    link.download = name + ".csv";
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  const all = (selector, event, act) => {
    for (const each of document.querySelectorAll(selector)) each.addEventListener(event, () => act(each, charts.get(each.dataset.chart)));
  };

  // Controls show what is drawn, also after another view was chosen.
  function refresh(chart) {
    for (const each of document.querySelectorAll(`[data-chart="${chart.name}"]`)) {
      if ("scale" in each.dataset) {
        each.value = scaleOf(chart);
        for (const option of each.options) option.disabled = option.value === "stretched" && !current(chart).stretch;
      }
      if ("across" in each.dataset) each.setAttribute("aria-pressed", String(acrossOf(chart) === "log"));
    }
  }

  for (const chart of data.charts) {
    state.set(chart.name, { view: 0, scale: null, across: null, place: -1, row: 0 });
    draw(chart);
    refresh(chart);
    element(chart.name).addEventListener("keydown", (event) => {
      const by = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
      if (!by || (by[1] && !isHeat(current(chart)))) return; // elsewhere up and down scroll the page
      event.preventDefault();
      step(chart, by);
    });
    element(chart.name).addEventListener("blur", () => Plotly.Fx.unhover(element(chart.name)));
  }
  all("[data-views]", "change", (control, chart) => {
    if (control.type === "radio" && !control.checked) return;
    Object.assign(state.get(chart.name), { view: Number(control.value), scale: null, across: null, place: -1, row: 0 });
    draw(chart);
    refresh(chart);
  });
  all("[data-scale]", "change", (select, chart) => {
    state.get(chart.name).scale = select.value;
    draw(chart);
  });
  all("[data-across]", "click", (button, chart) => {
    state.get(chart.name).across = acrossOf(chart) === "log" ? "linear" : "log";
    draw(chart);
    refresh(chart);
  });
  all("[data-reset]", "click", (button) => {
    element(button.dataset.reset).focus();
    draw(charts.get(button.dataset.reset));
  });
  all("[data-image]", "click", (button) => {
    const name = button.dataset.image, size = element(name).getBoundingClientRect();
    Plotly.downloadImage(element(name), { format: "png", filename: name, width: size.width, height: size.height, scale: 2 });
  });
  all("[data-table]", "click", (button) => download(button.dataset.table));
  all("[data-method]", "change", (box) => switched(box.dataset.method, box.checked));
  // Browsers remember controls when a page is loaded again.
  for (const box of document.querySelectorAll("[data-method]")) box.checked = true;
  for (const first of document.querySelectorAll("input[data-views][value='0']")) first.checked = true;
  for (const select of document.querySelectorAll("select[data-views]")) select.value = "0";

  // Boxes that hold more than they show say so, until their end is reached.
  function hint(box) {
    const inner = box.firstElementChild;
    const across = inner.scrollWidth - inner.clientWidth, down = inner.scrollHeight - inner.clientHeight;
    box.classList.toggle("across", across > 2 && inner.scrollLeft < across - 2);
    box.classList.toggle("scrolls", across > 2 || down > 2);
    box.classList.toggle("ended", inner.scrollLeft >= across - 2 && inner.scrollTop >= down - 2);
    box.lastElementChild.textContent = "scroll for more " + (across > 2 ? "→" : "") + (down > 2 ? "↓" : "");
  }
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => hint(entry.target)));
  for (const box of document.querySelectorAll(".box")) {
    sizes.observe(box);
    box.firstElementChild.addEventListener("scroll", () => hint(box), { passive: true });
  }

  // The navigation says where the reader is.
  const links = new Map([...document.querySelectorAll(".bar a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(() => {
    const sections = [...document.querySelectorAll("section")];
    const here = sections.findLast((section) => section.getBoundingClientRect().top < innerHeight / 3) || sections[0];
    for (const [name, link] of links) {
      if (here && name === here.id) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-33% 0px -66% 0px" });
  for (const section of document.querySelectorAll("section")) seen.observe(section);

  const again = () => data.charts.forEach(draw);
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  document.documentElement.dataset.ready = "true";
})();
