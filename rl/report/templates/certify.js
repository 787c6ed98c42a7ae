(() => {
  const { css } = page;
  const colors = (chart) => chart.series.map((series, i) => css(series.name === "floor" ? "--muted" : `--c${i}`));

  page.draw((chart) => ({
    traces: chart.series.map((series, i) => ({
      type: "bar", x: chart.x, y: series.y, name: series.name, marker: { color: colors(chart)[i] },
      hovertemplate: `${series.name}, %{x}: %{y:.4~g}<extra></extra>`,
    })),
    layout: {
      ...page.layout(), barmode: "group", bargap: 0.25,
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" },
      xaxis: { ...page.axis(), type: "category", showgrid: false },
      yaxis: { ...page.axis(), title: { text: chart.unit, standoff: 8 }, rangemode: "tozero", exponentformat: "power" },
    },
  }));
})();
