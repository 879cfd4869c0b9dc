// The outputs: values of the reference and of the selected plan, the worst samples, the map of the errors.

function outputsSection() {
  const box = section("outputs", "Outputs");
  const frame = h("div", {});
  onChange(({ plan }) => frame.replaceChildren(...outputStatistics(plan)));
  box.append(frame);
  return box;
}

/** The statistics of every output of the selected plan. */
function outputStatistics(plan) {
  const statistics = data.statistics.plans[plan.index];
  if (!statistics) return [h("p", {}, "Statistics of the outputs are kept for the points of the front and the baselines.")];
  const names = data.statistics.names.filter((name) => statistics.some(([, by]) => name in by));
  const rows = names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), statistics.map(([, by]) => h("td", { class: "number" }, name in by ? formatError(num(by[name])) : "-"))));
  const head = h("tr", {}, h("th", { scope: "col" }, "statistic"), statistics.map(([output]) => h("th", { scope: "col", class: "number" }, named(output, 40))));
  const what = plan.held_out === null ? "the search samples" : "the held-out samples";
  return [h("p", {}, `Selected plan ${plan.plan}, over ${what}.`), scrolling("Statistics of the outputs", h("table", { class: "statistics" }, h("thead", {}, head), h("tbody", {}, rows)))];
}

