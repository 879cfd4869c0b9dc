// The network from input to output: what each group costs and gains, and its precision in the selected plan.

/** Many rectangles as one path per style: a map of 40 plans and 500 groups is then a hundred elements, not ten thousand. */
function boxes(list) {
  const paths = new Map();
  for (const [style, x, y, width, height] of list) {
    const box = `M${x.toFixed(2)} ${y.toFixed(1)}h${width.toFixed(2)}v${height.toFixed(1)}h${(-width).toFixed(2)}z`;
    paths.set(style, (paths.get(style) ?? "") + box);
  }
  return [...paths].map(([style, d]) => s("path", { class: style, d }));
}

/** What a cell of a plan shows: groups that are pinned have a colour of their own. */
function cellStyle(plan, column) {
  const precision = precisionOf(plan, column);
  return groups[column].pinned === null ? precision : precision === "fp32" ? "pinned" : `pinned ${precision}`;
}

/** The cells of a plan; neighbours of one style are joined where cells are narrow. */
function cells(plan, left, cell, y, height) {
  const list = [];
  let start = 0;
  for (let column = 1; column <= groups.length; column += 1) {
    const style = cellStyle(plan, start);
    if (column < groups.length && cell <= 8 && cellStyle(plan, column) === style) continue;
    list.push([style, left + start * cell, y, (column - start) * cell - (cell > 4 ? 1 : 0), height]);
    start = column;
  }
  return boxes(list);
}

function strip() {
  const frame = find(".strip");
  const about = find(".about");
  const [errorLane, gainLane, cellLane, space] = [54, 40, 26, 18];
  let place = null;
  const draw = (width) => {
    const left = width < 560 ? 0 : 128;
    const cell = (width - left) / groups.length;
    const [errorTop, gainTop] = [space, 2 * space + errorLane];
    const cellTop = gainTop + gainLane + (left ? 8 : space);
    // One-group errors on a log scale; those that are not finite fill the lane.
    const logs = groups.filter((g) => g.error > 0 && Number.isFinite(g.error)).map((g) => Math.log10(g.error));
    const high = Math.max(...logs);
    const low = Math.max(Math.min(...logs), high - 6) - 0.3;
    const most = Math.max(...groups.map((g) => Math.abs(g.gain ?? 0)), 1e-12);
    const bars = groups.flatMap((group, column) => {
      const [x, wide] = [left + column * cell, Math.max(0.7, cell - (cell > 4 ? 1 : 0))];
      const share = Number.isFinite(group.error) ? Math.max(0.04, (Math.log10(group.error) - low) / (high - low || 1)) : 1;
      const size = Math.max(1, (Math.abs(group.gain) / most) * gainLane);
      return [
        group.error ? [share < 1 || Number.isFinite(group.error) ? "error-bar" : "lost-bar", x, errorTop + errorLane * (1 - share), wide, errorLane * share] : null,
        group.gain ? [group.gain > 0 ? "gain-bar" : "loss-bar", x, gainTop + gainLane - size, wide, size] : null,
      ].filter(Boolean);
    });
    const row = s("g", {});
    const cursor = s("rect", { class: "cursor", y: errorTop - 4, width: Math.max(3, cell + 1), height: cellTop + cellLane - errorTop + 8, rx: 2 });
    const titles = [[errorTop, "error alone"], [gainTop, "gain, ms"], [cellTop, "precision"]].map(([y, words]) => (left ? text(left - 8, y + 14, "end", words, "lane") : text(0, y - 4, "start", words, "lane")));
    frame.replaceChildren(picture(width, cellTop + cellLane + 34, "", titles, boxes(bars), row, scopeNames(left, cell, cellTop + cellLane, width), cursor));
    place = { left, cell, cellTop, row, cursor };
    show();
  };
  const show = () => {
    const column = state.group;
    about.replaceChildren(...(column === null ? [`${groups.length} layer groups. Click one, or use the arrow keys, for its name and figures.`] : describeGroup(column)));
    if (column !== null) say(frame, column, `${groups[column].id} ${cut(groups[column].name, 80)}, ${precisionOf(state.plan, column).toUpperCase()}`);
    if (!place) return;
    place.row.replaceChildren(...cells(state.plan, place.left, place.cell, place.cellTop, cellLane));
    fill(place.cursor, { visibility: column === null ? "hidden" : "visible", x: place.left + (column ?? 0) * place.cell - 1 }, []);
  };
  walker(frame, "Layer groups, input to output", groups.length - 1, () => state.group ?? -1, (column) => change({ group: column }));
  drawn(frame, draw);
  onChange(show);
  frame.addEventListener("click", (event) => {
    const column = Math.floor((event.clientX - frame.getBoundingClientRect().left - place.left) / place.cell);
    change({ group: column >= 0 && column < groups.length ? column : null });
  });
  const legend = [
    ["fp16", "FP16", true], ["fp32", "FP32", true], ["bf16", "BF16", hasBf16],
    ["pinned", "pinned", groups.some((g) => g.pinned !== null)],
    ["error-bar", "error with this group alone in FP16 (log scale)", groups.some((g) => g.error !== null)],
    ["gain-bar", "what it gains in FP16", groups.some((g) => g.gain > 0)],
    ["loss-bar", "slower in FP16", groups.some((g) => g.gain < 0)],
    ["lost-bar", "not finite in FP16", groups.some((g) => g.error === Infinity)],
  ];
  find("#network .legend").append(...legend.filter(([, , isThere]) => isThere).map(([style, words]) => h("span", {}, h("span", { class: `dot ${style}` }), words)));
}

/** The scopes of the layer names below the strip, as deep as they can be distinguished, where they have room. */
function scopeNames(left, cell, y, width) {
  const names = groups.map((group) => group.name.split("/").filter(Boolean));
  const scopesAt = (depth) => {
    const list = [];
    names.forEach((parts, column) => {
      const scope = parts.slice(0, depth).join("/");
      const last = list[list.length - 1];
      if (last && last.scope === scope) last.end = column + 1;
      else list.push({ scope, start: column, end: column + 1 });
    });
    return list;
  };
  let depth = 1;
  while (depth < 6 && (scopesAt(depth).length < 3 || scopesAt(depth + 1).length * 60 <= width)) depth += 1;
  let free = left;
  return scopesAt(depth).map(({ scope, start, end }) => {
    const x = left + start * cell;
    const words = cut(scope.split("/").slice(-2).join("/"), 24);
    const wide = words.length * 7.6;
    const fits = Math.min(x, width - wide);
    const hasRoom = fits >= free;
    if (hasRoom) free = fits + wide + 10;
    return [s("line", { class: "scope", x1: x + 0.5, x2: Math.max(x + 1, left + end * cell - 1), y1: y + 6, y2: y + 6 }), hasRoom ? text(fits, y + 20, "start", words, "scope-name") : ""];
  });
}

function describeGroup(column) {
  const group = groups[column];
  const kept = (reasonsOf(state.plan) || []).find((k) => k.group === group);
  const figures = [
    group.error === null ? "" : `Error alone: ${formatError(group.error)}`,
    group.gain === null ? "" : `FP16 gains ${formatNumber(group.gain)} ms`,
    group.casts === null ? "" : `its Casts cost ${formatNumber(group.casts)} ms`,
  ].filter(Boolean);
  const why = kept ? ` (${kept.because})` : group.pinned === null ? "" : `, pinned: ${cut(group.pinned, 700)}`;
  return [
    h("code", {}, group.id), " ", named(group.name, 120), ` \u2013 ${group.kind}: ${cut(group.ops, 160)}`, h("br"),
    h("b", {}, precisionOf(state.plan, column).toUpperCase()), ` in the selected plan${why}. ${figures.join(", ")}`,
  ];
}

/** A row for each point of the front, at most 40. */
function map() {
  const frame = find(".map");
  const all = front.filter((plan) => Number.isFinite(plan.ms)).sort((a, b) => a.ms - b.ms);
  const step = Math.ceil(all.length / 40);
  const rows = all.filter((plan, k) => k % step === 0 || plan === chosen || k === all.length - 1);
  const pitch = rows.length > 24 ? 12 : 16;
  let marker = null;
  const show = () => {
    const k = rows.indexOf(state.plan);
    if (marker) fill(marker, { visibility: k < 0 ? "hidden" : "visible", y: k * pitch + 1 }, []);
    say(frame, k, describePlan(state.plan));
  };
  drawn(frame, (width) => {
    const left = width < 560 ? 62 : 128;
    const parts = rows.map((plan, k) => {
      const y = k * pitch + 2;
      const style = plan === chosen ? "map-chosen" : "map-label";
      const ms = left > 100 ? text(left - 68, y + pitch - 5, "end", plan.ms_text, style) : "";
      return [text(left - 8, y + pitch - 5, "end", formatError(plan.error), style), ms, cells(plan, left, (width - left) / groups.length, y, pitch - 3)];
    });
    marker = s("rect", { class: "map-frame", x: left - 1, width: width - left + 1, height: pitch - 1, rx: 2 });
    frame.replaceChildren(picture(width, rows.length * pitch + 4, "", parts, marker));
    show();
  });
  onChange(show);
  walker(frame, "Precision of every group, a row per point of the front", rows.length - 1, () => rows.indexOf(state.plan), (k) => rows[k] && select(rows[k]));
  frame.addEventListener("click", (event) => {
    const plan = rows[Math.floor((event.clientY - frame.getBoundingClientRect().top - 2) / pitch)];
    if (plan) select(plan);
  });
}

