"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = () => ({ family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") });
  const decades = [-6, -5, -4, -3, -2, -1, 0];

  const trace = (chart) => chart.kind === "bars"
    ? { type: "bar", x: chart.x, y: chart.y, marker: { color: css("--c0") }, hovertemplate: "%{x}: %{y:.4~g}<extra></extra>" }
    : {
      type: "heatmap", x: chart.x, y: chart.y, z: chart.z, text: chart.text, zmin: -6, zmax: 0, xgap: 1, ygap: 1,
      hovertemplate: "%{y} %{x}: %{text}<extra></extra>", hoverongaps: false,
      colorscale: [[0, css("--line")], [0.5, css("--c1")], [1, css("--bad")]],
      colorbar: { thickness: 10, outlinewidth: 0, tickvals: decades, ticktext: decades.map((k) => `1e${k}`) },
    };

  const layout = (chart) => {
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), automargin: true };
    const heat = chart.kind === "heat";
    return {
      font: font(), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", bargap: 0.12,
      margin: { l: 58, r: 14, t: 8, b: 42 }, height: heat ? Math.max(180, 110 + 22 * chart.y.length) : 262,
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { ...font(), color: css("--ink") } },
      xaxis: { ...axis, type: "category", showgrid: false },
      yaxis: heat
        ? { ...axis, type: "category", autorange: "reversed", showgrid: false }
        : { ...axis, title: { text: "mean |d| in nats", standoff: 8 }, rangemode: "tozero" },
    };
  };

  const draw = () => charts.forEach((chart, i) => {
    const place = document.getElementById(`chart-${i}`);
    place.style.height = "auto";
    Plotly.react(place, [trace(chart)], layout(chart), { responsive: true, displaylogo: false, displayModeBar: false });
  });
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
