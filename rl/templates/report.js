"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = () => ({ family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") });
  const color = (trace, i) => css(trace.color ? `--${trace.color}` : `--c${i % 5}`);

  const toPlotly = (trace, i) => {
    const shared = { x: trace.x, y: trace.y, name: trace.name, text: trace.text };
    const hover = trace.text ? "%{text}" : "%{y:.4~g}";
    shared.hovertemplate = `${trace.name} ${hover}<extra></extra>`;
    if (trace.kind === "bars") return { ...shared, type: "bar", marker: { color: color(trace, i), line: { width: 0 } } };
    return {
      ...shared, type: "scatter", mode: trace.kind, cliponaxis: false,
      line: { color: color(trace, i), width: 2, dash: trace.dash },
      marker: { color: color(trace, i), size: 6 },
    };
  };

  const layout = (chart) => {
    const axis = {
      gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), tickcolor: css("--line"),
      automargin: true, fixedrange: false,
    };
    const { title, ...y } = chart.y;
    const result = {
      font: font(), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 58, r: 14, t: 8, b: 42 }, hovermode: "x unified", barmode: "stack", bargap: 0.12,
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { ...font(), color: css("--ink") } },
      showlegend: chart.traces.length > 1,
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", traceorder: "normal" },
      xaxis: { ...axis, title: { text: "optimizer step", standoff: 6 }, showgrid: false, ticks: "outside", ticklen: 4, rangemode: "tozero", tickformat: "d", hoverformat: "d" },
      yaxis: { ...axis, title: { text: title, standoff: 8 }, exponentformat: "power", minexponent: 3, ...y },
      annotations: [], shapes: [],
    };
    if (chart.annotation) {
      result.annotations.push({
        text: chart.annotation, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.55,
        font: { ...font(), size: 15, color: css("--good") },
      });
    }
    if (chart.zero_line) {
      result.shapes.push({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.zero_line, y1: chart.zero_line,
        line: { color: css("--muted"), width: 1, dash: "dot" },
      });
    }
    return result;
  };

  const draw = () => charts.forEach((chart, i) => Plotly.react(
    `chart-${i}`, chart.traces.map(toPlotly), layout(chart), { responsive: true, displaylogo: false, displayModeBar: false },
  ));
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
