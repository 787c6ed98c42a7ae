"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = () => ({ family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") });
  const axis = () => ({ gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), automargin: true });
  const category = () => ({ ...axis(), type: "category", showgrid: false });
  const legend = { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" };
  const layout = () => ({
    font: font(), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", bargap: 0.12,
    margin: { l: 58, r: 14, t: 8, b: 42 },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { ...font(), color: css("--ink") } },
  });

  // Curves over the steps of a run.
  const color = (trace, i) => css(trace.color ? `--${trace.color}` : `--c${i % 5}`);
  const curve = (trace, i) => {
    const shared = { x: trace.x, y: trace.y, name: trace.name, hovertemplate: `${trace.name} %{y:.4~g}<extra></extra>` };
    if (trace.kind === "bars") return { ...shared, type: "bar", marker: { color: color(trace, i), line: { width: 0 } } };
    return {
      ...shared, type: "scatter", mode: trace.kind, cliponaxis: false,
      line: { color: color(trace, i), width: 2, dash: trace.dash },
      marker: { color: color(trace, i), size: 6 },
    };
  };
  const curves = (chart) => {
    const own = { ...axis(), tickcolor: css("--line"), fixedrange: false };
    const { title, ...y } = chart.y;
    const result = {
      ...layout(), hovermode: "x unified", barmode: "stack", showlegend: chart.traces.length > 1,
      legend: { ...legend, traceorder: "normal" },
      xaxis: { ...own, title: { text: "optimizer step", standoff: 6 }, showgrid: false, ticks: "outside", ticklen: 4, rangemode: "tozero", tickformat: "d", hoverformat: "d" },
      yaxis: { ...own, title: { text: title, standoff: 8 }, ...y },
    };
    const last = Math.max(...chart.traces.flatMap((trace) => trace.x));
    if (last <= 10) Object.assign(result.xaxis, { tick0: 0, dtick: 1 });  // halves would round to one step twice
    return { traces: chart.traces.map(curve), layout: result };
  };

  // Bars of several sides beside each other; histograms where each side has values of its own.
  const groups = (chart) => ({
    traces: chart.series.map((series, i) => ({
      type: chart.x ? "bar" : "histogram", x: chart.x || series.x, y: series.y, name: series.name,
      marker: { color: css(series.name === "floor" ? "--muted" : `--c${i}`) },
      hovertemplate: `${series.name}, %{x}: %{y:.4~g}<extra></extra>`,
    })),
    layout: {
      ...layout(), barmode: "group", bargap: 0.25, legend,
      xaxis: chart.x ? category() : { ...axis(), title: { text: chart.along, standoff: 6 } },
      yaxis: { ...axis(), title: { text: chart.unit, standoff: 8 }, rangemode: "tozero", exponentformat: "power" },
    },
  });

  // Each chart is drawn, and again where the colours of the page change.
  const figure = (chart) => chart.traces ? curves(chart) : groups(chart);
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const all = () => charts.forEach((chart, i) => {
    const place = document.getElementById(`chart-${i}`);
    const { traces, layout } = figure(chart);
    if (layout.height) place.style.height = "auto";
    Plotly.react(place, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  });
  all();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
})();
