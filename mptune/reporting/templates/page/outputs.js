// The outputs: values of the reference and of the selected plan, the worst samples, the map of the errors.

function outputsSection() {
  const box = section("outputs", "Outputs");
  const frame = h("div", {});
  let shown = null;
  onChange(({ plan }) => {
    if (plan === shown) return;
    shown = plan;
    frame.replaceChildren(...sketches(plan), ...outputStatistics(plan));
  });
  box.append(frame);
  return box;
}

/** Histograms, worst samples and error maps of the plan, as far as the run holds them. */
function sketches(plan) {
  const known = data.outputs;
  if (!known) return [];
  const found = known.plans[plan.plan];
  if (!found) {
    const why = known.left_out.includes(plan.plan) ? "they did not fit into outputs.json" : "it was not run on the held-out samples";
    return [h("p", {}, `There are no histograms of plan ${plan.plan}: ${why}.`)];
  }
  const count = `${known.count} held-out ${known.unit}${known.count === 1 ? "" : "s"}`;
  const intro = h("p", {}, `Plan ${plan.plan} beside the FP32 reference on ${count}, ${found.source}.`);
  return [intro, ...Object.entries(found.outputs).map(([name, output], k) => outputBlock(name, output, k === 0))];
}

function outputBlock(name, output, open) {
  const build = () => output.parts.map((part, k) => partBlock(name, output, part, k === 0 ? output.error_map : null));
  const shape = output.shape.length ? ` [${output.shape.join(", ")}]` : "";
  const more = output.part_count > 1 ? `, ${output.part_count} parts, the worst ${output.parts.length === output.part_count ? "first" : output.parts.length}` : "";
  const box = folded("", [named(name, 80), `${shape}${more}`], () => h("div", {}, build()));
  box.removeAttribute("id");
  box.open = open;
  return box;
}

function partBlock(name, output, part, map) {
  const what = part.columns === null ? "" : `[${columnsText(part.columns)}] `;
  const error = `${part.statistic.replace(/\[.*/, "")} ${formatError(num(part.error))}`;
  const every = part.every > 1 ? ` (every ${part.every}th value)` : "";
  const plots = [
    figure(`values${every}: reference (grey) and plan (blue line)`, (width) => histogram(width, [[part.reference, "reference"], [part.plan, "plan"]], `Histogram of the values of ${cut(name, 60)}`)),
    figure(`plan minus reference${every}`, (width) => histogram(width, [[part.difference, "difference"]], `Histogram of the differences of ${cut(name, 60)}`)),
    figure("worst samples", (width) => worstSamples(width, part)),
    map ? figure(`largest difference in each place, ${sampleName(map.sample)}`, (width) => errorMap(width, map)) : null,
  ];
  return h("div", { class: "part" }, h("p", {}, h("b", {}, what), error, output.as_rows ? "; rows are compared as sets" : "", "."), h("div", { class: "plots" }, plots));
}

function columnsText(columns) {
  const [first, count] = [columns[0], columns.length];
  const isRange = count > 1 && columns.every((column, k) => column === first + k);
  return isRange ? `${first}:${first + count}` : cut(columns.join(","), 60);
}

function sampleName(number) {
  return cut(data.outputs.samples[number] ?? `held-out sample ${number}`, 60);
}

function figure(caption, draw) {
  const frame = h("div", {});
  drawn(frame, (width) => frame.replaceChildren(draw(width)));
  return h("figure", {}, h("figcaption", {}, caption), frame);
}

/** Two histograms over each other: the first filled, the second a line; what lies outside is said below. */
function histogram(width, layers, label) {
  const [left, right, top, bottom, height] = [4, width - 4, 6, 116, 152];
  const [low, high] = layers[0][0].range;
  const most = Math.max(1, ...layers.flatMap(([one]) => one.counts));
  const parts = [];
  for (const [one, style] of layers) {
    const step = (right - left) / one.counts.length;
    const y = (count) => bottom - (count / most) * (bottom - top);
    const tops = one.counts.map((count, k) => `${k ? "" : `M${left} ${bottom}`}V${y(count).toFixed(1)}H${(left + (k + 1) * step).toFixed(1)}`);
    parts.push(s("path", { class: `histogram ${style}`, d: `${tops.join("")}V${bottom}` }));
  }
  parts.push(s("line", { class: "scope", x1: left, x2: right, y1: bottom, y2: bottom }));
  const edge = (x, value, anchor) => s("text", { class: "tick", x, y: bottom + 16, "text-anchor": anchor }, formatNumber(num(value)));
  parts.push(edge(left, low, "start"), edge(right, high, "end"));
  const zero = left + ((0 - low) / (high - low)) * (right - left);
  if (Math.min(zero - left, right - zero) > 60) parts.push(edge(zero, 0, "middle"));
  const outside = layers.map(([one, style]) => {
    const list = [[one.below, "below"], [one.above, "above"], [one.non_finite, "not finite"]].filter(([count]) => count);
    return list.length ? `${style}: ${list.map(([count, word]) => `${count} ${word}`).join(", ")}` : "";
  });
  parts.push(s("text", { class: "tick", x: left, y: bottom + 33 }, outside.filter(Boolean).join("; ")));
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, parts);
}

/** The samples with the largest errors, as bars. */
function worstSamples(width, part) {
  const rows = part.worst_samples.slice(0, 6).map(([sample, error]) => [sample, num(error)]);
  const most = Math.max(...rows.map(([, error]) => (Number.isFinite(error) ? error : 0)), 1e-300);
  const pitch = 22;
  const [left, right] = [Math.min(150, width * 0.42), width - 66];
  const parts = rows.map(([sample, error], k) => {
    const share = Number.isFinite(error) ? error / most : 1;
    const y = k * pitch + 4;
    return [
      s("text", { class: "tick", x: left - 8, y: y + 11, "text-anchor": "end" }, cut(sampleName(sample), Math.max(8, Math.floor(left / 7)))),
      s("rect", { class: Number.isFinite(error) ? "error-bar" : "lost-bar", x: left, y, width: Math.max(1, share * (right - left)).toFixed(1), height: 14 }),
      s("text", { class: "tick", x: left + share * (right - left) + 6, y: y + 11 }, formatError(error)),
    ];
  });
  const height = rows.length * pitch + 6;
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Errors of the worst samples: ${rows.map(([sample, error]) => `${sampleName(sample)} ${formatError(error)}`).join(", ")}` }, parts);
}

/** Where an output differs on its worst sample: the darker, the larger the difference. */
function errorMap(width, map) {
  const [rows, columns] = map.grid;
  const levels = Uint8Array.from(atob(map.levels), (letter) => letter.charCodeAt(0));
  const scale = Math.min(width / columns, 220 / rows);
  const canvas = h("canvas", { width: columns, height: rows, role: "img", "aria-label": `Map of the differences, ${map.size.join(" x ")}: white none, dark ${formatNumber(map.scale)}` });
  const pixels = new ImageData(columns, rows);
  levels.forEach((level, k) => pixels.data.set(shade(level / 255), 4 * k));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  canvas.style.width = `${Math.floor(columns * scale)}px`;
  canvas.style.height = `${Math.floor(rows * scale)}px`;
  return h("div", {}, canvas, h("div", { class: "legend" }, h("span", { class: "ramp" }), `0 to ${formatNumber(map.scale)}; ${map.size.join(" x ")}`));
}

/** From white over orange to dark red: readable on either background. */
function shade(share) {
  const stops = [[255, 255, 250], [253, 190, 110], [214, 72, 36], [88, 8, 24]];
  const at = Math.min(stops.length - 1.0001, share * (stops.length - 1));
  const k = Math.floor(at);
  return [0, 1, 2].map((c) => Math.round(stops[k][c] + (at - k) * (stops[k + 1][c] - stops[k][c]))).concat(255);
}

/** The statistics of every output of the selected plan. */
function outputStatistics(plan) {
  const statistics = data.statistics.plans[plan.index];
  if (!statistics) return [h("p", {}, "Statistics of the outputs are kept for the points of the front and the baselines.")];
  const names = data.statistics.names.filter((name) => statistics.some(([, by]) => name in by));
  const what = plan.held_out === null ? "the search samples" : "the held-out samples";
  const head = h("tr", {}, h("th", { scope: "col" }, "statistic"), statistics.map(([output]) => h("th", { scope: "col", class: "number" }, output === "*" ? "all outputs" : named(output, 40))));
  const rows = names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), statistics.map(([, by]) => h("td", { class: "number" }, name in by ? formatError(num(by[name])) : "-"))));
  const table = () => scrolling("Statistics of the outputs", h("table", { class: "statistics" }, h("thead", {}, head), h("tbody", {}, rows)));
  const box = folded("statistics", `Every statistic of plan ${plan.plan}, over ${what}`, table);
  box.open = !data.outputs;
  return [box];
}

