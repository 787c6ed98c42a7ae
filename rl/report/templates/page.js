"use strict";
const page = (() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = () => ({ family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") });
  const axis = () => ({ gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), automargin: true });
  const layout = () => ({
    font: font(), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", bargap: 0.12,
    margin: { l: 58, r: 14, t: 8, b: 42 },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { ...font(), color: css("--ink") } },
  });

  // Draws each chart, and again where the colours of the page change. `figure(chart, place)` gives its traces and layout.
  const draw = (figure) => {
    const charts = JSON.parse(document.getElementById("charts").textContent);
    const all = () => charts.forEach((chart, i) => {
      const place = document.getElementById(`chart-${i}`);
      const { traces, layout } = figure(chart, place);
      Plotly.react(place, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
    });
    all();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  };
  return { css, font, axis, layout, draw };
})();
