// The network from input to output: what each group costs and gains, and its precision in the selected plan.

const LANES = { error: 54, gain: 40, cells: 26, names: 34, space: 18 };

function stripSection() {
  const box = section("network", "The network, input to output");
  const frame = h("div", { class: "strip" });
  const about = h("p", { class: "about", "aria-live": "polite" });
  let cursor = null;
  let picture = null;
  walker(frame, "Layer groups, input to output", () => groups.length, () => state.group ?? -1, (column) => change({ group: column }));
  const redraw = drawn(frame, (width) => {
    picture = stripPicture(width);
    cursor = picture.cursor;
    frame.replaceChildren(picture.node);
    show();
  });
  const show = () => {
    const column = state.group;
    about.replaceChildren(...(column === null ? [`${plural(groups.length, "layer group")}. Click one, or use the arrow keys, for its name and figures.`] : describeGroup(column)));
    if (column !== null) say(frame, column, `${groups[column].id} ${cut(groups[column].name, 80)}, ${precisionOf(state.plan, column).toUpperCase()}`);
    if (!picture) return;
    picture.cells.replaceChildren(...runs(state.plan, picture.left, picture.cell, picture.cellTop, LANES.cells));
    cursor.setAttribute("visibility", column === null ? "hidden" : "visible");
    if (column !== null) cursor.setAttribute("x", picture.left + column * picture.cell - 1);
  };
  onChange(show);
  const columnAt = (event) => {
    const rect = frame.getBoundingClientRect();
    const column = Math.floor((event.clientX - rect.left - picture.left) / picture.cell);
    return column >= 0 && column < groups.length ? column : null;
  };
  frame.addEventListener("click", (event) => picture && change({ group: columnAt(event) }));
  box.append(frame, stripLegend(), about, reasonsBlock(), mapBlock());
  return { node: box, redraw };
}

function stripPicture(width) {
  const narrow = width < 560;
  const left = narrow ? 0 : 128;
  const cell = (width - left) / groups.length;
  const errorTop = LANES.space;
  const gainTop = errorTop + LANES.error + LANES.space;
  const cellTop = gainTop + LANES.gain + (narrow ? LANES.space : 8);
  const height = cellTop + LANES.cells + LANES.names;
  const cells = s("g", {});
  const cursor = s("rect", { class: "cursor", y: errorTop - 4, width: Math.max(3, cell + 1), height: cellTop + LANES.cells - errorTop + 8, rx: 2 });
  const title = (y, text) => s("text", { class: "lane", x: narrow ? 0 : left - 8, y: narrow ? y - 4 : y + 14, "text-anchor": narrow ? "start" : "end" }, text);
  const node = s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    title(errorTop, "error alone"), errorBars(left, cell, errorTop), title(gainTop, "gain, ms"), gainBars(left, cell, gainTop),
    title(cellTop, "precision"), cells, scopeNames(left, cell, cellTop + LANES.cells, width), cursor,
  );
  return { node, cells, cursor, left, cell, cellTop };
}

/** Many rectangles as one path per style: a map of 40 plans and 500 groups is then a hundred elements, not ten thousand. */
class Boxes {
  constructor() {
    this.styles = new Map();
  }

  add(style, x, y, width, height) {
    const box = `M${x.toFixed(2)} ${y.toFixed(1)}h${width.toFixed(2)}v${height.toFixed(1)}h${(-width).toFixed(2)}z`;
    this.styles.set(style, (this.styles.get(style) ?? "") + box);
  }

  /** One bar in the column of a group, at least wide enough to be seen. */
  bar(style, left, cell, column, y, height) {
    this.add(style, left + column * cell, y, Math.max(0.7, cell - (cell > 4 ? 1 : 0)), height);
  }

  paths() {
    return [...this.styles].map(([style, d]) => s("path", { class: style, d }));
  }
}

/** One-group errors on a log scale; those that are not finite fill the lane. */
function errorBars(left, cell, top) {
  const known = groups.map((group) => group.error).filter((error) => error > 0 && Number.isFinite(error)).map(Math.log10);
  const low = Math.max(Math.min(...known), Math.max(...known) - 6) - 0.3;
  const high = Math.max(...known);
  const bars = new Boxes();
  groups.forEach((group, column) => {
    if (group.error === null || group.error === 0) return;
    const finite = Number.isFinite(group.error);
    const share = finite ? Math.max(0.04, (Math.log10(group.error) - low) / (high - low || 1)) : 1;
    bars.bar(finite ? "error-bar" : "lost-bar", left, cell, column, top + LANES.error * (1 - share), LANES.error * share);
  });
  return bars.paths();
}

/** What a group gains in FP16; what is slower in FP16 hangs down in another colour. */
function gainBars(left, cell, top) {
  const most = Math.max(...groups.map((group) => Math.abs(group.gain ?? 0)), 1e-12);
  const bars = new Boxes();
  groups.forEach((group, column) => {
    if (!group.gain) return;
    const size = Math.max(1, (Math.abs(group.gain) / most) * LANES.gain);
    bars.bar(group.gain > 0 ? "gain-bar" : "loss-bar", left, cell, column, top + LANES.gain - size, size);
  });
  return bars.paths();
}

/** What a cell of a plan shows: groups that are pinned have a colour of their own. */
function cellStyle(plan, column) {
  const precision = precisionOf(plan, column);
  return groups[column].pinned === null ? precision : precision === "fp32" ? "pinned" : `pinned ${precision}`;
}

/** The cells of a plan; neighbours of one state are joined where cells are narrow. */
function runs(plan, left, cell, y, height) {
  const boxes = new Boxes();
  let start = 0;
  for (let column = 1; column <= groups.length; column += 1) {
    const style = cellStyle(plan, start);
    if (column < groups.length && cell <= 8 && cellStyle(plan, column) === style) continue;
    boxes.add(style, left + start * cell, y, (column - start) * cell - (cell > 4 ? 1 : 0), height);
    start = column;
  }
  return boxes.paths();
}

/** The scopes of the layer names below the strip, as deep as they can be distinguished, where they have room. */
function scopeNames(left, cell, y, width) {
  const words = groups.map((group) => group.name.split(/[/]+/).filter(Boolean));
  const runsAt = (depth) => {
    const found = [];
    words.forEach((parts, column) => {
      const scope = parts.slice(0, depth).join("/");
      const last = found[found.length - 1];
      if (last && last.scope === scope) last.end = column + 1;
      else found.push({ scope, start: column, end: column + 1 });
    });
    return found;
  };
  let found = runsAt(1);
  for (let depth = 2; depth <= 6; depth += 1) {
    const deeper = runsAt(depth);
    if (found.length >= 3 && deeper.length * 60 > width) break;
    found = deeper;
  }
  const parts = [];
  let free = left;
  for (const { scope, start, end } of found) {
    const x = left + start * cell;
    const room = (end - start) * cell;
    parts.push(s("line", { class: "scope", x1: x + 0.5, x2: Math.max(x + 1, x + room - 1), y1: y + 6, y2: y + 6 }));
    const last = scope.split("/").slice(-2).join("/");
    const text = cut(last, 24);
    const wide = text.length * 7.6;
    const fits = Math.min(x, width - wide);
    if (fits < free) continue;
    parts.push(s("text", { class: "scope-name", x: fits, y: y + 20 }, s("title", {}, cut(scope, 300)), text));
    free = fits + wide + 10;
  }
  return s("g", {}, parts);
}

function describeGroup(column) {
  const group = groups[column];
  const kept = (reasonsOf(state.plan) || []).find((k) => k.group === group);
  const figures = [
    group.error === null ? null : `Error alone: ${formatError(group.error)}`,
    group.gain === null ? null : `FP16 gains ${formatNumber(group.gain)} ms`,
    group.casts === null ? null : `its Casts cost ${formatNumber(group.casts)} ms`,
  ].filter(Boolean);
  return [
    h("code", {}, group.id), " ", named(group.name, 120), ` \u2013 ${group.kind}: ${cut(group.ops, 160)}`, h("br"),
    h("b", {}, precisionOf(state.plan, column).toUpperCase()), " in the selected plan",
    kept ? [" (", prose(kept.because || kept.word), ")"] : group.pinned === null ? "" : [", pinned: ", prose(group.pinned)],
    figures.length ? `. ${figures.join(", ")}.` : ".",
  ].flat(Infinity);
}

function stripLegend() {
  const item = (style, text) => h("span", {}, h("span", { class: `dot ${style}` }), text);
  const parts = [item("fp16", "FP16"), item("fp32", "FP32")];
  if (plans.some((plan) => plan.bits.includes("b"))) parts.push(item("bf16", "BF16"));
  if (groups.some((group) => group.pinned !== null)) parts.push(item("pinned", "pinned"));
  if (groups.some((group) => group.error !== null)) parts.push(item("error-bar", "error with this group alone in FP16 (log scale)"));
  if (groups.some((group) => group.gain > 0)) parts.push(item("gain-bar", "what it gains in FP16"));
  if (groups.some((group) => group.gain < 0)) parts.push(item("loss-bar", "slower in FP16"));
  if (groups.some((group) => group.error === Infinity)) parts.push(item("lost-bar", "not finite in FP16"));
  return h("div", { class: "legend" }, parts);
}

// -- all rows of the front --------------------------------------------------------------------------------------------

const MOST_ROWS = 40;

function mapBlock() {
  const all = front.filter((plan) => Number.isFinite(plan.ms)).sort((a, b) => a.ms - b.ms);
  const step = Math.ceil(all.length / MOST_ROWS);
  const rows = all.filter((plan, k) => k % step === 0 || plan === chosen || k === all.length - 1);
  const frame = h("div", { class: "map" });
  const text = rows.length === all.length ? `All ${rows.length} points of the front, the fastest first.` : `${rows.length} of the ${all.length} points of the front: one in ${step}, the chosen one and the last, the fastest first.`;
  const pitch = rows.length > 24 ? 12 : 16;
  let frameRow = null;
  let left = 0;
  const draw = (width) => {
    left = width < 560 ? 62 : 128;
    const cell = (width - left) / groups.length;
    const parts = rows.map((plan, k) => {
      const y = k * pitch + 2;
      const style = plan === chosen ? "map-chosen" : "map-label";
      const words = [s("text", { class: style, x: left - 8, y: y + pitch - 5, "text-anchor": "end" }, formatError(plan.error))];
      if (left > 100) words.push(s("text", { class: style, x: left - 68, y: y + pitch - 5, "text-anchor": "end" }, plan.ms_text));
      return [words, runs(plan, left, cell, y, pitch - 3)];
    });
    frameRow = s("rect", { class: "map-frame", x: left - 1, width: width - left + 1, height: pitch - 1, rx: 2 });
    const height = rows.length * pitch + 4;
    frame.replaceChildren(s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, parts, frameRow));
    show();
  };
  const show = () => {
    const k = rows.indexOf(state.plan);
    if (frameRow) {
      frameRow.setAttribute("visibility", k < 0 ? "hidden" : "visible");
      frameRow.setAttribute("y", k * pitch + 1);
    }
    say(frame, k, describePlan(state.plan));
  };
  walker(frame, "Precision of every group, a row per point of the front", () => rows.length, () => rows.indexOf(state.plan), (k) => rows[k] && select(rows[k]));
  frame.addEventListener("click", (event) => {
    const plan = rows[Math.floor((event.clientY - frame.getBoundingClientRect().top - 2) / pitch)];
    if (plan) select(plan);
  });
  drawn(frame, draw);
  onChange(show);
  return h("div", { class: "map-block" }, h("h3", {}, "Every point, group by group"), h("p", {}, text + " Columns: latency in ms, error, then a cell per layer group. A click selects."), frame, folded("groups", "Every group as a table", groupsTable));
}

function groupsTable() {
  const columns = [
    { name: "group", value: (c) => c, cell: (c) => h("code", {}, groups[c].id) },
    { name: "name", value: (c) => groups[c].name, cell: (c) => named(groups[c].name, 60) },
    { name: "kind", value: (c) => groups[c].kind, cell: (c) => groups[c].kind },
    { name: "operators", value: (c) => groups[c].ops, cell: (c) => cut(groups[c].ops, 80) },
    { name: "error alone", number: true, value: (c) => groups[c].error ?? -1, cell: (c) => formatError(groups[c].error) },
    { name: "gain, ms", number: true, value: (c) => groups[c].gain ?? -1e9, cell: (c) => (groups[c].gain === null ? "-" : formatNumber(groups[c].gain)) },
    { name: "selected plan", value: (c) => cellStyle(state.plan, c), cell: (c) => [h("span", { class: `dot ${cellStyle(state.plan, c)}` }), precisionOf(state.plan, c).toUpperCase(), groups[c].pinned === null ? "" : h("small", {}, ` pinned: ${cut(groups[c].pinned, 120)}`)] },
  ];
  const rows = groups.map((_, column) => column);
  const table = sortable(columns, () => rows, { row: (column) => ({ onclick: () => change({ group: column }) }) });
  let shown = state.plan;
  onChange(({ plan }) => {
    if (plan !== shown) table.show();
    shown = plan;
  });
  return scrolling("Every group", table.node);
}

