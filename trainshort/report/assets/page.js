"use strict";
// Draws the charts from the data in the page. Nothing here asks for anything outside of it.
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const coarse = matchMedia("(pointer: coarse)");
  const hidden = new Set();
  const state = new Map(); // chart name -> { view, x, y }
  // Nothing leaves the page: no button of plotly's own that sends a chart or its data anywhere.
  const away = {
    showSendToCloud: false, showEditInChartStudio: false, showLink: false, sendData: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud", "sendDataToCloud", "editInChartStudio"],
  };
  const element = (name) => document.getElementById("chart-" + name);

  function themed(chart, layout, listed) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = (given) => ({
      gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--quiet"), automargin: true, ...given,
    });
    const chosen = state.get(chart.name);
    const x = axis(layout.xaxis), y = axis(layout.yaxis);
    if (chosen.x) x.type = chosen.x;
    if (chosen.y) y.type = chosen.y;
    if (x.type === "linear" && x.tickmode === "array") { delete x.tickmode; delete x.tickvals; delete x.ticktext; }
    if (narrow.matches && x.tickmode === "array") {
      x.ticktext = x.ticktext.map((text, place) => x.tickvals[place] >= 10000 ? Math.round(x.tickvals[place] / 1000) + "k" : text);
    }
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", separators: ".,",
      font: { color: color("--text"), family: "system-ui, sans-serif", size: narrow.matches ? 12 : 13 },
      margin: { l: 60, r: 16, t: 12, b: 50 }, hovermode: "closest", showlegend: true,
      hoverlabel: { namelength: -1 }, dragmode: coarse.matches ? false : "zoom", // a finger scrolls the page
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
      ...layout, height: layout.height || (narrow.matches ? 380 + 18 * Math.max(0, listed - 3) : 430), xaxis: x, yaxis: y,
    };
  }

  function draw(chart) {
    const view = chart.views[state.get(chart.name).view];
    const traces = view.traces.map((trace) => ({
      ...trace, visible: hidden.has(trace.legendgroup) ? "legendonly" : true,
      ...(trace.texttemplate && narrow.matches && trace.x.length > 4 ? { texttemplate: "" } : {}),
    }));
    const listed = traces.filter((trace) => trace.showlegend !== false).length;
    const config = { responsive: true, displaylogo: false, ...away };
    return Plotly.react(element(chart.name), traces, themed(chart, view.layout, listed), config);
  }

  function legendSwitched(name, shown) {
    if (shown) hidden.delete(name); else hidden.add(name);
    for (const box of document.querySelectorAll("input[data-method]")) {
      if (box.dataset.method === name) box.checked = shown;
    }
    for (const chart of data.charts) {
      if (chart.views.some((view) => view.traces.some((trace) => trace.legendgroup === name))) draw(chart);
    }
  }

  function download(name) {
    const table = data.tables[name];
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([table], { type: "text/csv;charset=utf-8" }));
    link.download = name + ".csv";
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  for (const chart of data.charts) {
    const layout = chart.views[0].layout;
    state.set(chart.name, { view: 0, x: null, y: null });
    draw(chart).then((drawn) => {
      drawn.on("plotly_legendclick", (event) => {
        const name = event.data[event.curveNumber].legendgroup;
        legendSwitched(name, hidden.has(name));
        return false;
      });
      drawn.on("plotly_legenddoubleclick", () => false);
    });
    for (const button of document.querySelectorAll(`button[data-chart="${chart.name}"]`)) {
      const which = button.dataset.axis;
      const now = () => state.get(chart.name)[which] || chart.views[state.get(chart.name).view].layout[which + "axis"].type;
      const say = () => {
        button.setAttribute("aria-pressed", String(now() === "log"));
      };
      button.addEventListener("click", () => {
        state.get(chart.name)[which] = now() === "log" ? "linear" : "log";
        draw(chart);
        say();
      });
      button.refresh = say;
      say();
    }
  }
  for (const select of document.querySelectorAll("select[data-chart]")) {
    select.addEventListener("change", () => {
      const chart = data.charts.find((each) => each.name === select.dataset.chart);
      Object.assign(state.get(chart.name), { view: Number(select.value), x: null, y: null });
      draw(chart);
      for (const button of document.querySelectorAll(`button[data-chart="${chart.name}"]`)) button.refresh();
    });
  }
  for (const button of document.querySelectorAll("button[data-table]")) {
    button.addEventListener("click", () => download(button.dataset.table));
  }
  for (const box of document.querySelectorAll("input[data-method]")) {
    box.checked = true; // browsers remember boxes when a page is loaded again
    box.addEventListener("change", () => legendSwitched(box.dataset.method, box.checked));
  }
  const again = () => data.charts.forEach(draw);
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  document.documentElement.dataset.ready = "true";
})();
