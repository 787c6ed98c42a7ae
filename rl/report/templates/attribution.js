(() => {
  const { css } = page;
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
    const heat = chart.kind === "heat";
    return {
      ...page.layout(), height: heat ? Math.max(180, 110 + 22 * chart.y.length) : 262,
      xaxis: { ...page.axis(), type: "category", showgrid: false },
      yaxis: heat
        ? { ...page.axis(), type: "category", autorange: "reversed", showgrid: false }
        : { ...page.axis(), title: { text: "mean |d| in nats", standoff: 8 }, rangemode: "tozero" },
    };
  };

  page.draw((chart, place) => {
    place.style.height = "auto";
    return { traces: [trace(chart)], layout: layout(chart) };
  });
})();
