// How the search went: what each evaluation added, where the time went, what failed, on which machine.

function progressSection() {
  const box = section("search", "How the search went");
  const count = data.evaluations;
  box.append(h("p", {}, `${plural(count, "plan")} evaluated, ${data.failures} failed.`));
  const values = data.progress.hypervolume;
  if (values.length > 1 && values[values.length - 1] > 0) box.append(...growth(values));
  const time = timeBar();
  if (time) box.append(...time);
  if (data.failed.length) box.append(failuresBlock());
  const facts = h("dl", { class: "facts" }, data.facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, prose(value))]));
  box.append(h("h3", {}, "Environment"), facts);
  return box;
}

/** The share of the final trade-off that was found after each evaluation. */
function growth(values) {
  const last = values[values.length - 1];
  const frame = h("div", { class: "growth" });
  const half = values.findIndex((v) => v >= 0.95 * last) + 1;
  drawn(frame, (width) => {
    const [left, right, top, bottom, height] = [52, width - 12, 12, 130, 166];
    const x = (k) => left + (values.length < 2 ? 0 : (k / (values.length - 1)) * (right - left));
    const y = (v) => bottom - (v / last) * (bottom - top);
    const path = values.map((v, k) => (k ? `H${x(k).toFixed(1)}V${y(v).toFixed(1)}` : `M${x(0)} ${y(v).toFixed(1)}`)).join("");
    const grid = [0, 0.5, 1].map((share) => [s("line", { class: "grid", x1: left, x2: right, y1: y(share * last), y2: y(share * last) }), s("text", { class: "tick", x: left - 8, y: y(share * last) + 4, "text-anchor": "end" }, `${share * 100} %`)]);
    const marks = ticks(1, values.length, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger).map((n) => s("text", { class: "tick", x: x(n - 1), y: bottom + 18, "text-anchor": "middle" }, String(n)));
    frame.replaceChildren(
      s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Share of the final trade-off after each evaluation; 95 % after ${half}` }, grid, marks, s("path", { class: "staircase", d: path }), s("text", { class: "axis", x: (left + right) / 2, y: height - 2, "text-anchor": "middle" }, "evaluations")),
    );
  });
  const text = `95 % of the final trade-off was there after ${plural(half, "evaluation")}. The trade-off is counted as the hypervolume: the area, between no latency and that of all-FP32 and between an exact output and an error of ${formatError(num(data.progress.reference_error))} (log scale), in which some plan is at least as fast and as exact; here ${formatPercent(num(last))} of all of it, by the errors of the search samples.`;
  return [h("h3", {}, "What each evaluation added"), frame, h("p", { class: "note" }, text)];
}

function timeBar() {
  const { trials, trials_s: whole, builds_s: builds, span_s: span } = data.progress;
  if (!trials || !(whole > 0)) return null;
  const parts = [
    ["building engines", Math.min(builds, whole), "time-build"],
    ["running, timing and judging plans", Math.max(0, whole - builds), "time-run"],
    ["between plans: proposals, preparation, pauses", Math.max(0, span - whole), "time-rest"],
  ].filter(([, seconds]) => seconds > 0.005 * Math.max(span, whole));
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const bar = h("div", { class: "time", role: "img", "aria-label": parts.map(([name, seconds]) => `${name}: ${formatDuration(seconds)}`).join(", ") });
  for (const [, seconds, style] of parts) {
    const piece = h("span", { class: style });
    piece.style.width = `${(seconds / total) * 100}%`;
    bar.append(piece);
  }
  const legend = h("div", { class: "legend" }, parts.map(([name, seconds, style]) => h("span", {}, h("span", { class: `dot ${style}` }), `${name}: ${formatDuration(seconds)} (${formatPercent(seconds / total)})`)));
  return [h("h3", {}, "Where the time went"), bar, legend];
}

function failuresBlock() {
  const rows = data.failed.map((f) =>
    h("tr", {}, h("td", {}, h("code", {}, f.plan)), h("td", {}, cut(f.origin, 60)), h("td", {}, `${f.stage}: ${f.kind}`), h("td", {}, prose(f.message), f.line ? h("div", { class: "log" }, f.log ? h("code", {}, f.log) : null, " ", f.line) : null)),
  );
  const head = h("tr", {}, ["plan", "origin", "where", "message; first line of the log"].map((name) => h("th", { scope: "col" }, name)));
  const more = data.failures > rows.length ? h("p", { class: "note" }, `${plural(rows.length, "plan")} failed to build or run${data.failures - rows.length > 0 ? `; the other ${data.failures - rows.length} gave outputs that are not finite, or are not listed` : ""}.`) : null;
  return h("details", { id: "failures", open: rows.length <= 5 }, h("summary", {}, `${plural(data.failures, "failure")}`), scrolling("Failures", h("table", {}, h("thead", {}, head), h("tbody", {}, rows))), more);
}

