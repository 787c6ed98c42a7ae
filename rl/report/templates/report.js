(() => {
  const { css, font } = page;
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
    const axis = { ...page.axis(), tickcolor: css("--line"), fixedrange: false };
    const { title, ...y } = chart.y;
    const result = {
      ...page.layout(), hovermode: "x unified", barmode: "stack",
      showlegend: chart.traces.length > 1,
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", traceorder: "normal" },
      xaxis: { ...axis, title: { text: "optimizer step", standoff: 6 }, showgrid: false, ticks: "outside", ticklen: 4, rangemode: "tozero", tickformat: "d", hoverformat: "d" },
      yaxis: { ...axis, title: { text: title, standoff: 8 }, exponentformat: "none", ...y },
      annotations: [], shapes: [],
    };
    const last = Math.max(...chart.traces.flatMap((trace) => trace.x));
    if (last <= 10) Object.assign(result.xaxis, { tick0: 0, dtick: 1 });  // halves would round to one step twice
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

  page.draw((chart) => ({ traces: chart.traces.map(toPlotly), layout: layout(chart) }));
})();
