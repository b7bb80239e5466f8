// Draws every figure in the reader's colours, and again when these change or the page turns.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 600px)");
const colours = {
  light: ["#0b57d0", "#c2410c", "#0f766e", "#9333ea", "#a16207", "#be185d", "#4d7c0f", "#0e7490", "#6b7280", "#7f1d1d", "#1e3a8a"],
  dark: ["#8ab4f8", "#fb923c", "#5eead4", "#d8b4fe", "#fde047", "#f9a8d4", "#bef264", "#67e8f9", "#d1d5db", "#fca5a5", "#a5b4fc"],
};
const symbols = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon", "triangle-down", "pentagon", "bowtie"];
const dashes = ["dash", "dot", "dashdot", "longdash", "2px,6px", "8px,3px,2px,3px,2px,3px"];

function coloured(trace, number, guideNumber, palette, soft) {
  if (trace.meta.guide) {
    return { ...trace, line: { color: soft, width: 1.5, dash: dashes[guideNumber % dashes.length] } };
  }
  const color = palette[number % palette.length];
  return {
    ...trace,
    line: { width: 2, ...trace.line, color },
    marker: trace.type === "bar" ? { color } : { color, size: 7, symbol: symbols[number % symbols.length] },
  };
}

// On a narrow screen, an axis over many powers of ten is marked at these alone.
function thinned(axis, numbers) {
  const isLong = axis.dtick === "D2" && Math.max(...numbers) > 300 * Math.min(...numbers);
  return narrow.matches && isLong ? { ...axis, dtick: 1 } : axis;
}

function draw(plot) {
  const { data, layout } = JSON.parse(plot.querySelector("script").textContent);
  const style = getComputedStyle(document.documentElement);
  const [ink, rule, soft] = ["--ink", "--rule", "--soft"].map((name) => style.getPropertyValue(name).trim());
  const palette = dark.matches ? colours.dark : colours.light;
  let number = 0, guides = 0;
  const traces = data.map((trace) => coloured(trace, trace.meta.guide ? 0 : number++, trace.meta.guide ? guides++ : 0, palette, soft));
  const axis = (values) => ({
    ...values, gridcolor: rule, zerolinecolor: rule, linecolor: rule, tickcolor: rule,
    title: { ...values.title, standoff: 10 }, fixedrange: true,
  });
  const rows = layout.showlegend ? Math.ceil(traces.length / (narrow.matches ? 1 : 2)) : 0;
  const full = {
    ...layout, xaxis: axis(thinned(layout.xaxis, data.flatMap(({ x }) => x))), yaxis: axis(layout.yaxis),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: narrow.matches ? 12 : 13, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 10, r: 14, t: 14, b: 10 },
    height: (narrow.matches ? 320 : 360) + 20 * rows,
    legend: { orientation: "h", x: 0, xanchor: "left", y: -0.2, yanchor: "top", yref: "paper" },
    hoverlabel: { font: { size: 13 } },
  };
  let area = plot.querySelector(".area");
  if (!area) {
    area = document.createElement("div");
    area.className = "area";
    plot.append(area);
  }
  return Plotly.react(area, traces, full, { responsive: true, displayModeBar: false });
}

function drawAll() {
  return Promise.all([...document.querySelectorAll(".plot")].map(draw)).then(() => {
    document.documentElement.dataset.drawn = document.querySelectorAll(".area.js-plotly-plot").length;
  });
}
dark.addEventListener("change", drawAll);
narrow.addEventListener("change", drawAll);
drawAll();
