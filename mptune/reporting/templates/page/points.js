// The whole table of points, folded and sortable.

/** A table whose headings sort it. `rows()` gives the items; a column has name, value and cell. */
function sortable(columns, rows, { row = () => ({}), start = 0 } = {}) {
  let by = start;
  let down = false;
  const body = h("tbody");
  const style = (column) => [column.number ? "number" : "", column.style ?? ""].join(" ").trim() || null;
  const heads = columns.map((column, k) => {
    const button = h("button", { type: "button", onclick: () => sort(k) }, column.name);
    return h("th", { scope: "col", class: style(column) }, button);
  });
  const node = h("table", {}, h("thead", {}, h("tr", {}, heads)), body);
  function sort(k) {
    down = k === by && !down;
    by = k;
    show();
  }
  function show() {
    const value = columns[by].value;
    const keyed = rows().map((item) => [value(item), item]);
    const rank = (v) => (typeof v === "number" && Number.isNaN(v) ? Infinity : v);
    keyed.sort(([a], [b]) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0) * (down ? -1 : 1));
    heads.forEach((head, k) => head.setAttribute("aria-sort", k === by ? (down ? "descending" : "ascending") : "none"));
    body.replaceChildren(...keyed.map(([, item]) => h("tr", row(item), columns.map((column) => h("td", { class: style(column) }, column.cell(item))))));
  }
  show();
  return { node, show, body };
}

function pointsBlock() {
  return folded("points", `All ${plural(front.length, "point")} of the front, and every other plan, as a table`, pointsTable);
}

function pointsTable() {
  const columns = [
    { name: "ms", number: true, value: (p) => p.ms, cell: (p) => [p.ms_text, p.interval ? h("small", {}, " " + p.interval) : null] },
    { name: "plan", value: (p) => p.plan, cell: (p) => [h("button", { type: "button", class: "pickable", onclick: () => select(p) }, h("code", {}, p.plan))] },
    { name: "speedup", number: true, value: (p) => p.speedup, cell: (p) => p.speedup_text },
    { name: "error, held out", number: true, value: (p) => p.held_out ?? Infinity, cell: (p) => (p.held_out === null ? "-" : formatError(p.held_out)) },
    { name: "error, search", number: true, value: (p) => (p.finite ? p.search : Infinity), cell: (p) => (p.finite ? `${p.search_larger ? "!" : ""}${formatError(p.search)}` : h("span", { class: "bad" }, "not finite")) },
    ...data.metrics.map((name, k) => ({ name, number: true, value: (p) => num(p.metrics[k][1] ?? p.metrics[k][0]) ?? -Infinity, cell: (p) => p.metrics[k][2] })),
    { name: countsName, number: true, value: (p) => p.halves, cell: counts },
    { name: "memory", number: true, value: (p) => p.memory, cell: (p) => h("span", { title: p.memory_parts }, p.memory) },
    { name: "kept in FP32 because", style: "because", value: (p) => p.because, cell: (p) => p.because },
    { name: "part", style: "extra", isConstant: new Set(plans.map((p) => p.part)).size < 2, value: (p) => p.part, cell: (p) => cut(p.part, 30) },
    { name: "what", value: (p) => roleOf(p) || p.origin, cell: (p) => [roleOf(p) || p.origin, onFront.has(p.index) ? "" : ", not on the front"].join("") },
    { name: "sources", style: "extra", isConstant: new Set(plans.map((p) => p.sources)).size < 2, value: (p) => p.sources, cell: (p) => p.sources },
  ].filter((column) => !column.isConstant);
  let every = false;
  const listed = () => (every ? plans : plans.filter((p) => onFront.has(p.index) || p === fp32 || p === fp16 || p === chosen || p === state.plan));
  const look = (p) => [p === chosen ? "is-chosen" : "", p === state.plan ? "is-selected" : "", onFront.has(p.index) ? "" : "is-off"].join(" ").trim();
  const table = sortable(columns, listed, { row: (p) => ({ class: look(p) || null, "data-plan": p.plan }) });
  const box = h("input", { type: "checkbox", id: "every-plan", onchange: (event) => { every = event.target.checked; table.show(); } });
  onChange(() => {
    if (!every && !table.body.querySelector(`[data-plan="${state.plan.plan}"]`)) table.show();
    for (const row of table.body.children) row.classList.toggle("is-selected", row.dataset.plan === state.plan.plan);
  });
  return h(
    "div",
    {},
    h("p", {}, data.sources.join(" ")),
    plans.length > front.length ? h("label", { class: "check", for: "every-plan" }, box, ` also the plans that are not on the front (${plans.length} in all)`) : null,
    scrolling("All points", table.node),
  );
}

