// The outputs: values of the reference and of the selected plan, the worst samples, the map of the errors. Then the page.

/** Histograms, worst samples and error maps of the plan, as far as the run holds them. */
function sketches(plan) {
  const stored = data.outputs;
  if (!stored) return [];
  const sketch = stored.plans[plan.plan];
  if (!sketch) {
    const why = stored.left_out.includes(plan.plan) ? "they did not fit into outputs.json" : "it was not run on the held-out samples";
    return [h("p", {}, `There are no histograms of plan ${plan.plan}: ${why}.`)];
  }
  const intro = h("p", {}, `Plan ${plan.plan} beside the FP32 reference on the held-out ${stored.unit}s (${stored.count}), ${sketch.source}.`);
  const outputs = Object.entries(sketch.outputs).map(([name, output], k) => {
    const more = output.part_count > output.parts.length ? `, the worst ${output.parts.length} of ${output.part_count} parts` : "";
    const box = h("details", {}, h("summary", {}, named(name, 80), ` [${output.shape.join(", ")}]${more}`));
    folded(box, () => h("div", {}, pictures(stored, name, output), output.parts.map((part, n) => partBlock(name, output, part, n ? null : output.error_map))));
    box.open = k === 0;
    return box;
  });
  return [intro, ...outputs];
}

/** The output of the first held-out sample, where it is like an image; red is NaN or Inf. */
function pictures(stored, name, output) {
  const half = (stored.plans[data.unpinned] ?? stored.plans[fp16?.plan])?.outputs[name];
  const files = { FP32: output.picture?.reference, "all groups in FP16": half?.picture?.plan, "this plan": output.picture?.plan };
  const figure = ([caption, png]) => png && h("figure", {}, h("figcaption", {}, caption), h("img", { width: 256, alt: caption, src: `data:image/png;base64,${png}` }));
  return h("div", { class: "plots" }, Object.entries(files).map(figure));
}

function partBlock(name, output, part, errors) {
  const columns = part.columns === null ? "" : `[${cut(part.columns.join(","), 60)}] `;
  const every = part.every > 1 ? ` (every ${part.every}th value)` : "";
  const sample = (number) => cut(data.outputs.samples[number] ?? `held-out sample ${number}`, 60);
  const worst = part.worst_samples.map(([number, error]) => `${sample(number)} ${formatError(num(error))}`);
  const figure = (caption, draw) => {
    const frame = h("div", {});
    drawn(frame, (width) => frame.replaceChildren(draw(width)));
    return h("figure", {}, h("figcaption", {}, caption), frame);
  };
  return h(
    "div", { class: "part" },
    h("p", {}, h("b", {}, columns), `${part.statistic.replace(/\[.*/, "")} ${formatError(num(part.error))}${output.as_rows ? "; rows are compared as sets" : ""}. Worst: ${worst.join(", ")}.`),
    h(
      "div", { class: "plots" },
      figure(`values${every}: reference (grey) and plan (blue line)`, (width) => histogram(width, [[part.reference, "reference"], [part.plan, "plan"]], `Histogram of the values of ${cut(name, 60)}`)),
      figure(`plan minus reference${every}`, (width) => histogram(width, [[part.difference, "difference"]], `Histogram of the differences of ${cut(name, 60)}`)),
      errors ? figure(`largest difference in each place, ${sample(errors.sample)}`, (width) => errorMap(width, errors)) : "",
    ),
  );
}

/** Two histograms over each other: the first filled, the second a line; what lies outside is said below. */
function histogram(width, layers, label) {
  const [left, right, top, bottom] = [4, width - 4, 6, 116];
  const [low, high] = layers[0][0].range;
  const most = Math.max(1, ...layers.flatMap(([one]) => one.counts));
  const bars = layers.map(([{ counts }, style]) => {
    const tops = counts.map((count, k) => `V${(bottom - (count / most) * (bottom - top)).toFixed(1)}H${(left + ((k + 1) * (right - left)) / counts.length).toFixed(1)}`);
    return s("path", { class: `histogram ${style}`, d: `M${left} ${bottom}${tops.join("")}V${bottom}` });
  });
  const outside = layers.flatMap(([one, style]) => [[one.below, "below"], [one.above, "above"], [one.non_finite, "not finite"]].filter(([count]) => count).map(([count, word]) => `${style}: ${count} ${word}`));
  const zero = left + ((0 - low) / (high - low)) * (right - left);
  return picture(
    width, 152, label, bars,
    s("line", { class: "scope", x1: left, x2: right, y1: bottom, y2: bottom }),
    text(left, bottom + 16, "start", formatNumber(num(low))), text(right, bottom + 16, "end", formatNumber(num(high))),
    Math.min(zero - left, right - zero) > 60 ? text(zero, bottom + 16, "middle", "0") : "",
    text(left, bottom + 33, "start", outside.join("; ")),
  );
}

/** Where an output differs on its worst sample: the darker, the larger the difference. */
function errorMap(width, errors) {
  const [rows, columns] = errors.grid;
  const scale = Math.min(width / columns, 220 / rows);
  const canvas = h("canvas", { width: columns, height: rows, role: "img", "aria-label": `Map of the differences, ${errors.size.join(" x ")}: white none, dark ${formatNumber(errors.scale)}` });
  const pixels = new ImageData(columns, rows);
  // From white over orange to dark red: readable on either background.
  const stops = [[255, 255, 250], [253, 190, 110], [214, 72, 36], [88, 8, 24]];
  [...atob(errors.levels)].forEach((letter, k) => {
    const place = (letter.charCodeAt(0) / 255) * 2.9999;
    const [from, to] = [stops[Math.floor(place)], stops[Math.floor(place) + 1]];
    pixels.data.set([...from.map((value, c) => Math.round(value + (place % 1) * (to[c] - value))), 255], 4 * k);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  [canvas.style.width, canvas.style.height] = [`${Math.floor(columns * scale)}px`, `${Math.floor(rows * scale)}px`];
  return h("div", {}, canvas, h("div", { class: "legend" }, h("span", { class: "ramp" }), `0 to ${formatNumber(errors.scale)}; ${errors.size.join(" x ")}`));
}

/** The statistics of every output of the selected plan. */
function outputStatistics(plan) {
  const statistics = data.statistics[plan.index];
  if (!statistics) return h("p", {}, "Statistics of the outputs are kept for the points of the front and the baselines.");
  const names = [...new Set(statistics.flatMap(([, by]) => Object.keys(by)))];
  const head = h("tr", {}, h("th", { scope: "col" }, "statistic"), statistics.map(([output]) => h("th", { scope: "col", class: "number" }, output === "*" ? "all outputs" : named(output, 40))));
  const rows = names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), statistics.map(([, by]) => h("td", { class: "number" }, formatError(num(by[name] ?? null))))));
  const summary = `Every statistic of plan ${plan.plan}, over the ${plan.held_out === null ? "search" : "held-out"} samples`;
  return h("details", { open: !data.outputs }, h("summary", {}, summary), scrolling("Statistics of the outputs", h("table", { class: "statistics" }, h("thead", {}, head), h("tbody", {}, rows))));
}

chart();
selection();
if (groups.length) {
  strip();
  map();
  folded(find("#groups"), groupsTable);
}
folded(find("#points"), pointsTable);
let shownPlan = null;
onChange(({ plan }) => {
  if (plan !== shownPlan) find("#outputs > div").replaceChildren(...sketches(plan), outputStatistics(plan));
  shownPlan = plan;
});
change({});
// Paper shows what is folded.
window.addEventListener("beforeprint", () => document.querySelectorAll("#points, #groups").forEach((box) => (box.open = true)));
