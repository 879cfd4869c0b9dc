// The tables of all points and of all groups, folded and sortable.

const scrolling = (label, table) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);

/** A table whose headings sort it. `rows()` gives the items; a column is [name, value to sort by, cell, style]. */
function sortable(columns, rows, attributes) {
  let by = 0;
  let sign = 1;
  const body = h("tbody");
  const heads = columns.map(([name, , , style], k) => h("th", { scope: "col", class: style }, h("button", { type: "button", onclick: () => show(k) }, name)));
  function show(k) {
    if (k !== undefined) [by, sign] = [k, k === by ? -sign : 1];
    const rank = (item) => (Number.isNaN(columns[by][1](item)) ? Infinity : columns[by][1](item));
    const order = [...rows()].sort((a, b) => sign * (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0));
    heads.forEach((head, n) => head.setAttribute("aria-sort", n !== by ? "none" : sign < 0 ? "descending" : "ascending"));
    body.replaceChildren(...order.map((item) => h("tr", attributes(item), columns.map(([, , cell, style]) => h("td", { class: style }, cell(item))))));
  }
  show();
  return { node: h("table", {}, h("thead", {}, h("tr", {}, heads)), body), show };
}

function pointsTable() {
  const differ = (key) => new Set(plans.map((p) => p[key])).size > 1;
  const what = (p) => roleOf(p) || p.origin;
  const columns = [
    ["ms", (p) => p.ms, (p) => [p.ms_text, h("small", {}, " " + p.interval)], "number"],
    ["plan", (p) => p.plan, (p) => h("button", { type: "button", class: "pickable", onclick: () => select(p) }, h("code", {}, p.plan))],
    ["speedup", (p) => p.speedup, (p) => p.speedup_text, "number"],
    ["error, held out", (p) => p.held_out ?? Infinity, (p) => formatError(p.held_out), "number"],
    ["error, search", (p) => (p.finite ? p.search : Infinity), (p) => `${p.search_larger ? "!" : ""}${p.finite ? formatError(p.search) : "not finite"}`, "number"],
    ...data.metrics.map((name, k) => [name, (p) => num(p.metrics[k][1] ?? p.metrics[k][0]) ?? -Infinity, (p) => p.metrics[k][2], "number"]),
    [countsName, (p) => p.halves, counts, "number"],
    ["memory", (p) => p.memory, (p) => h("span", { title: p.memory_parts }, p.memory), "number"],
    ["kept in FP32 because", (p) => p.because, (p) => p.because, "because"],
    ...(differ("part") ? [["part", (p) => p.part, (p) => cut(p.part, 30), "extra"]] : []),
    ["what", what, (p) => what(p) + (onFront.has(p.index) ? "" : ", not on the front")],
    ...(differ("sources") ? [["sources", (p) => p.sources, (p) => p.sources, "extra"]] : []),
  ];
  const every = h("input", { type: "checkbox", id: "every-plan", onchange: () => table.show() });
  const listed = () => plans.filter((p) => every.checked || onFront.has(p.index) || p === state.plan || roleOf(p));
  const look = (p) => [p === chosen ? "is-chosen" : "", p === state.plan ? "is-selected" : "", onFront.has(p.index) ? "" : "is-off"].join(" ").trim();
  const table = sortable(columns, listed, (p) => ({ class: look(p) || null, "data-plan": p.plan }));
  onChange(() => table.show());
  return h("div", {}, h("label", { class: "check", for: "every-plan" }, every, ` also the plans that are not on the front (${plans.length} in all)`), scrolling("All points", table.node));
}

function groupsTable() {
  const pinned = (c) => (groups[c].pinned === null ? "" : h("small", {}, ` pinned: ${cut(groups[c].pinned, 120)}`));
  const columns = [
    ["group", (c) => c, (c) => h("code", {}, groups[c].id)],
    ["name", (c) => groups[c].name, (c) => named(groups[c].name, 60)],
    ["kind", (c) => groups[c].kind, (c) => groups[c].kind],
    ["operators", (c) => groups[c].ops, (c) => cut(groups[c].ops, 80)],
    ["error alone", (c) => groups[c].error ?? -1, (c) => formatError(groups[c].error), "number"],
    ["gain, ms", (c) => groups[c].gain ?? -1e9, (c) => (groups[c].gain === null ? "-" : formatNumber(groups[c].gain)), "number"],
    ["selected plan", (c) => cellStyle(state.plan, c), (c) => [h("span", { class: `dot ${cellStyle(state.plan, c)}` }), precisionOf(state.plan, c).toUpperCase(), pinned(c)]],
  ];
  const table = sortable(columns, () => groups.map((_, column) => column), (column) => ({ onclick: () => change({ group: column }) }));
  let shown = state.plan;
  onChange(({ plan }) => {
    if (plan !== shown) table.show();
    shown = plan;
  });
  return scrolling("Every group", table.node);
}

