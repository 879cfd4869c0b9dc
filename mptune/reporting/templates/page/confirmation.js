// A confirmation: what the search reported and what the device measured, both rankings side by side.

function confirmationSection() {
  const found = data.confirmation;
  if (!found) return null;
  const box = section("confirmation", `Search against measurement: ${cut(found.device, 80)}`);
  box.append(...found.verdicts.map((text) => h("p", {}, text + ".")));
  const frame = h("div", { class: "rankings" }, ranking(found, "ms", `latency, ${found.latency_was}`, (figures) => figures.ms_text), ranking(found, "error", `error, ${found.error_was}`, (figures) => formatError(num(figures.error))));
  const failed = found.plans.filter((plan) => !plan.measured);
  const line = (style, text) => legendItem(s("g", { class: style }, s("line", { x1: 0, x2: 12, y1: 6, y2: 6 })), text);
  box.append(frame, h("div", { class: "legend" }, line("rank is-chosen", "chosen"), line("rank", "same rank"), line("rank moved", "another rank")));
  if (failed.length) box.append(h("ul", { class: "plain" }, failed.map((plan) => h("li", {}, "failed: ", h("code", {}, plan.plan), ` (${cut(plan.origin, 60)}): `, prose(plan.failure)))));
  box.append(folded("confirmed-table", "Both figures of every plan", () => scrolling("Confirmed plans", confirmedTable(found))));
  return box;
}

/** A line from each plan's rank in the search to its rank on the device: crossings are where the order differs. */
function ranking(found, key, before, format) {
  const pairs = found.plans.filter((plan) => plan.measured).map((plan) => ({ plan, was: num(plan.searched[key]), now: num(plan.measured[key]) }));
  const rank = (name) => new Map([...pairs].sort((a, b) => a[name] - b[name]).map((pair, k) => [pair, k]));
  const [was, now] = [rank("was"), rank("now")];
  const frame = h("div", { class: "ranking" });
  drawn(frame, (width) => {
    const pitch = 20;
    const [left, right] = [78, width - 78];
    const lines = pairs.map((pair) => {
      const [y1, y2] = [30 + was.get(pair) * pitch, 30 + now.get(pair) * pitch];
      const style = pair.plan.place === "chosen" ? "rank is-chosen" : was.get(pair) === now.get(pair) ? "rank" : "rank moved";
      return s(
        "g",
        { class: style },
        s("title", {}, `${pair.plan.plan} (${pair.plan.origin})`),
        s("line", { x1: left + 8, x2: right - 8, y1, y2 }),
        s("circle", { cx: left + 8, cy: y1, r: 3.5 }),
        s("circle", { cx: right - 8, cy: y2, r: 3.5 }),
        s("text", { x: left - 2, y: y1 + 4, "text-anchor": "end" }, format(pair.plan.searched)),
        s("text", { x: right + 2, y: y2 + 4 }, format(pair.plan.measured)),
      );
    });
    const height = 30 + pairs.length * pitch;
    frame.replaceChildren(
      s(
        "svg",
        { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Ranking by ${before} and as measured here, ${pairs.length} plans` },
        s("text", { class: "axis", x: 0, y: 13 }, before), s("text", { class: "axis", x: width, y: 13, "text-anchor": "end" }, "measured here"), lines,
      ),
    );
  });
  return frame;
}

function confirmedTable(found) {
  const columns = [
    { name: "measured ms", number: true, value: (p) => (p.measured ? num(p.measured.ms) : Infinity), cell: (p) => (p.measured ? p.measured.ms_text : "-") },
    { name: "plan", value: (p) => p.plan, cell: (p) => h("code", {}, p.plan) },
    { name: `ms, ${found.latency_was}`, number: true, value: (p) => num(p.searched.ms), cell: (p) => p.searched.ms_text },
    { name: "measured speedup", number: true, value: (p) => (p.measured ? num(p.measured.speedup) : -1), cell: (p) => (p.measured ? p.measured.speedup_text : "-") },
    { name: "measured error", number: true, value: (p) => (p.measured ? num(p.measured.error) : Infinity), cell: (p) => (p.measured ? p.measured.error_text : "-") },
    { name: `error, ${found.error_was}`, number: true, value: (p) => num(p.searched.error), cell: (p) => p.searched.error_text },
    { name: "became", value: (p) => p.place, cell: (p) => p.place },
    { name: "origin", value: (p) => p.origin, cell: (p) => p.origin },
  ];
  return sortable(columns, () => found.plans, { row: (p) => ({ class: p.place === "chosen" ? "is-chosen" : null }) }).node;
}

