// Latency against error: every plan, the front, two limits to drag, and the selected point.

function chartSection() {
  const frame = h("div", { class: "chart" });
  const tip = h("div", { class: "tip", hidden: true });
  const notes = h("div", { class: "legend" });
  const order = [...front].sort((a, b) => a.ms - b.ms);
  walker(frame, "Points of the front, the fastest first", () => order.length, () => order.indexOf(state.plan), (k) => order[k] && select(order[k]));
  let axes = null;
  let live = null;
  const redraw = drawn(frame, (width) => {
    axes = makeAxes(width, Math.round(Math.min(460, Math.max(300, width * 0.58))));
    live = s("g", {});
    const picture = s("svg", { viewBox: `0 0 ${width} ${axes.height}`, width, height: axes.height, "aria-hidden": "true" }, grid(axes), points(axes), live);
    frame.replaceChildren(picture, tip);
    notes.replaceChildren(...legend(axes));
    show();
  });
  const show = () => {
    say(frame, order.indexOf(state.plan), describePlan(state.plan));
    if (live) live.replaceChildren(...limits(axes, frame), ...selected(axes));
  };
  onChange(show);
  pointing(frame, tip, () => axes);
  let drawnFor = state.samples;
  onChange(() => {
    if (state.samples !== drawnFor) redraw();
    drawnFor = state.samples;
  });
  return { node: h("div", { class: "chart-box" }, frame, notes, samplesSwitch()), redraw };
}

function grid(axes) {
  const { box, inner } = axes;
  const parts = [];
  for (const value of ticks(axes.fromMs, axes.toMs, Math.max(3, Math.floor((box.right - box.left) / 90)))) {
    const x = axes.x(value);
    parts.push(s("line", { class: "grid", x1: x, x2: x, y1: box.top, y2: box.bottom }));
    parts.push(s("text", { class: "tick", x, y: box.bottom + 20, "text-anchor": "middle" }, String(value)));
  }
  for (const { log, text } of logTicks(axes.low, axes.high)) {
    const y = axes.y(10 ** log);
    parts.push(s("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
    parts.push(s("text", { class: "tick", x: box.left - 12, y: y + 4, "text-anchor": "end" }, text));
  }
  const strip = (y, text) => {
    parts.push(s("rect", { class: "band", x: box.left, y, width: box.right - box.left, height: axes.band - 3 }));
    parts.push(s("text", { class: "tick", x: box.left - 12, y: y + axes.band / 2 + 2, "text-anchor": "end" }, text));
  };
  if (axes.hasBroken) strip(box.top, "Inf");
  if (axes.over) strip(box.top + (axes.hasBroken ? axes.band : 0), "far");
  if (axes.hasExact) strip(inner.bottom + 3, "exact");
  const place = axes.width < 500 ? "" : ` for ${cut(data.target, 28)}`;
  const source = data.latency_is === "predicted" ? `predicted${place}` : "measured";
  parts.push(s("text", { class: "axis", x: (box.left + box.right) / 2, y: axes.height - 6, "text-anchor": "middle" }, `latency, ms (${source})`));
  const middle = (box.top + box.bottom) / 2;
  parts.push(s("text", { class: "axis", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, `error, ${cut(data.metric, 30)}${state.samples === "search" ? ", search" : ""}`));
  return s("g", {}, parts);
}

function points(axes) {
  const marked = new Set([...front, fp32, fp16, chosen]);
  const faint = plans.filter((p) => !marked.has(p) && Number.isFinite(p.ms)).map((p) => mark(axes, p, "faint", 3.5));
  const main = [...marked].filter((p) => p && Number.isFinite(p.ms)).sort((a, b) => (a === chosen) - (b === chosen));
  const circles = main.map((p) => mark(axes, p, p === chosen ? "chosen" : onFront.has(p.index) ? "front" : "baseline", p === chosen ? 7 : 5));
  return s("g", { class: faint.length > 400 ? "many" : null }, faint, staircase(axes), circles, labels(axes, main, circles));
}

/** A disc: error on held-out samples; a ring: on the search samples alone; a triangle: beyond the edge; a cross: not finite. */
function mark(axes, plan, style, radius) {
  const [x, y] = axes.at(plan);
  if (!plan.finite) return s("path", { class: "broken", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` });
  if (plan.ms > axes.toMs) return s("path", { class: style, d: `M${x - 4} ${y - 5}l9 5l-9 5z` });
  if (shownError(plan) > 10 ** axes.high) return s("path", { class: style, d: `M${x - 5} ${y + 4}l5 -9l5 9z` });
  const ring = someHeldOut && state.samples === "choice" && plan.held_out === null && style !== "faint" ? " ring" : "";
  return s("circle", { class: style + ring, cx: x.toFixed(1), cy: y.toFixed(1), r: radius });
}

/** From each point to the right until the next, more exact one: what can be had at that latency. */
function staircase(axes) {
  const order = front.filter((p) => p.ms <= axes.toMs).sort((a, b) => a.ms - b.ms);
  if (order.length < 2 || state.samples === "search") return null; // its steps are those of the error that choices go by
  const path = order.slice(1).map((p) => `H${axes.px(p).toFixed(1)}V${axes.py(p).toFixed(1)}`);
  return s("path", { class: "staircase", d: `M${axes.px(order[0]).toFixed(1)} ${axes.py(order[0]).toFixed(1)}${path.join("")}` });
}

/** Names of the baselines, the chosen plan and those beside it, each where it covers the least. */
function labels(axes, main) {
  const taken = main.map((p) => axes.at(p)).map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
  const texts = [];
  const names = new Map([chosen, fp32, fp16].filter(Boolean).map((plan) => [plan, roleOf(plan)]));
  for (const { plan, role } of data.neighbours) names.set(plans[plan], [names.get(plans[plan]), role].filter(Boolean).join(", "));
  for (const [plan, text] of names) {
    const [x, y] = axes.at(plan);
    const wide = text.length * 6.9;
    const places = [[x + 11, y - 9], [x + 11, y + 17], [x - 11 - wide, y - 9], [x - 11 - wide, y + 17], [x - wide / 2, y - 16], [x - wide / 2, y + 24]];
    const cost = ([left, base]) => {
      const area = [left - 2, base - 12, left + wide + 2, base + 4];
      const outside = left < axes.box.left + 2 || left + wide > axes.width - 2 || base < 12 || base > axes.box.bottom - 2;
      return (outside ? 10 : 0) + taken.filter((t) => t[0] < area[2] && t[2] > area[0] && t[1] < area[3] && t[3] > area[1]).length;
    };
    const best = places.reduce((a, b) => (cost(b) < cost(a) ? b : a));
    taken.push([best[0], best[1] - 12, best[0] + wide, best[1] + 4]);
    texts.push(s("text", { class: plan === chosen ? "label chosen-label" : "label", x: best[0], y: best[1] }, text));
  }
  return texts;
}

function selected(axes) {
  const plan = state.plan;
  if (!Number.isFinite(plan.ms)) return [];
  const [x, y] = axes.at(plan);
  const parts = [];
  const clip = (v, low, high) => Math.min(high, Math.max(low, v));
  if (plan.finite && plan.ms <= axes.toMs) {
    const [x1, x2] = [plan.low, plan.high].map((ms) => clip(axes.x(Math.min(ms, axes.toMs)), axes.box.left, axes.box.right));
    if (x2 - x1 > 2) parts.push(s("line", { class: "whisker", x1, x2, y1: y, y2: y }));
    if (plan.ci95 && plan.held_out === null && plan.ci95.every((e) => e > 0)) {
      const [y1, y2] = plan.ci95.map((e) => clip(axes.y(e), axes.inner.top, axes.inner.bottom));
      if (y1 - y2 > 2) parts.push(s("line", { class: "whisker", x1: x, x2: x, y1, y2 }));
    }
  }
  parts.push(s("circle", { class: "halo", cx: x, cy: y, r: 11 }));
  return parts;
}

/** The two limits: what is beyond them is shaded; their handles can be dragged. */
function limits(axes, frame) {
  const { box, inner } = axes;
  const parts = [];
  const isChoice = state.samples === "choice";
  const yError = state.error > 0 && isChoice ? Math.min(box.bottom, Math.max(box.top, axes.y(state.error))) : null;
  const xMs = state.ms > 0 ? Math.min(box.right, Math.max(box.left, axes.x(state.ms))) : null;
  if (yError !== null) parts.push(s("rect", { class: "beyond", x: box.left, y: box.top, width: box.right - box.left, height: yError - box.top }), s("line", { class: "limit", x1: box.left, x2: box.right, y1: yError, y2: yError }));
  if (xMs !== null) parts.push(s("rect", { class: "beyond", x: xMs, y: box.top, width: box.right - xMs, height: box.bottom - box.top }), s("line", { class: "limit", x1: xMs, x2: xMs, y1: box.top, y2: box.bottom }));
  const round = (value) => Number(value.toPrecision(value > 0 ? 2 : 1));
  const fine = (value) => Number(value.toPrecision(3));
  const drag = (toError, toMs) => (event) => {
    event.preventDefault();
    event.stopPropagation();
    const rect = frame.getBoundingClientRect();
    const move = (e) => {
      const [px, py] = [e.clientX - rect.left, e.clientY - rect.top];
      if (toError) limit(py <= inner.top - 4 ? null : round(axes.errorAt(Math.min(py, inner.bottom))), state.ms);
      if (toMs) limit(state.error, px >= inner.right - 2 ? null : fine(axes.msAt(Math.max(px, box.left + 1))));
    };
    const end = new AbortController();
    const stop = () => end.abort();
    for (const [name, react] of Object.entries({ pointermove: move, pointerup: stop, pointercancel: stop })) window.addEventListener(name, react, { signal: end.signal });
  };
  // The handles sit on the axes, where they cover no point; without a limit at the far end.
  const yHandle = yError ?? box.top;
  const xHandle = xMs ?? box.right;
  const handle = (style, x, y, width, height, what, ...drags) =>
    s("g", { class: `handle ${style}`, onpointerdown: drag(...drags) }, s("rect", { class: "touch", x: x - 18, y: y - 18, width: 36, height: 36 }), s("rect", { class: "grip", x: x - width / 2, y: y - height / 2, width, height, rx: 5 }), s("title", {}, what));
  if (isChoice) parts.push(handle("error-handle", box.left, yHandle, 18, 12, "drag: largest error", true, false));
  parts.push(handle("ms-handle", xHandle, box.bottom, 12, 18, "drag: largest latency", false, true));
  return parts;
}

/** Hovering names the nearest point, a click or a tap selects it. */
function pointing(frame, tip, axesNow) {
  const nearest = (event, most) => {
    const axes = axesNow();
    const rect = frame.getBoundingClientRect();
    const [px, py] = [event.clientX - rect.left, event.clientY - rect.top];
    let best = null;
    let least = most;
    for (const plan of plans) {
      if (!Number.isFinite(plan.ms)) continue;
      const [x, y] = axes.at(plan);
      // A point of the front wins over one that lies behind it.
      const distance = Math.hypot(x - px, y - py) + (onFront.has(plan.index) || roleOf(plan) ? 0 : 5);
      if (distance < least) [best, least] = [plan, distance];
    }
    return best;
  };
  frame.addEventListener("click", (event) => {
    if (event.target.closest(".handle")) return;
    const plan = nearest(event, 26);
    if (plan) select(plan);
  });
  frame.addEventListener("pointermove", (event) => {
    const plan = event.pointerType === "touch" ? null : nearest(event, 16);
    tip.hidden = plan === null;
    frame.classList.toggle("over", plan !== null);
    if (!plan) return;
    const [x, y] = axesNow().at(plan);
    tip.replaceChildren(...tipLines(plan));
    tip.style.left = `${Math.max(0, Math.min(x + 14, axesNow().width - 210))}px`;
    tip.style.top = `${y + 14}px`;
  });
  frame.addEventListener("pointerleave", () => (tip.hidden = true));
}

function tipLines(plan) {
  const lines = [
    `${plan.ms_text} ms, ${plan.speedup_text}`,
    plan.finite ? `error ${errorText(plan)}${plan.held_out === null ? " (search samples)" : plan.search_larger ? "" : " (held out)"}` : "outputs not finite",
    `${counts(plan)} groups ${countsName}`,
    [roleOf(plan), plan.plan].filter(Boolean).join(", "),
  ];
  return lines.map((text) => h("div", {}, text));
}

/** Which samples the errors of the chart are of: the held-out ones, that few plans have met, or the search's for all. */
function samplesSwitch() {
  if (!someHeldOut) return null;
  const option = (value, text) => {
    const input = h("input", { type: "radio", name: "samples", id: `samples-${value}`, checked: value === state.samples, onchange: () => change({ samples: value }) });
    return h("label", { for: `samples-${value}` }, input, " ", text);
  };
  return h("fieldset", { class: "switch" }, h("legend", {}, "Errors on"), option("choice", ["held-out samples where known, as ", h("code", {}, "mptune pick"), " goes by"]), option("search", "search samples, for every plan"));
}

/** What the marks mean that are there. */
function legend(axes) {
  const disc = (style) => s("circle", { class: style, cx: 6, cy: 6, r: 5 });
  const hasRings = someHeldOut && [...front, fp32, fp16, chosen].some((p) => p && p.finite && p.held_out === null);
  return [
    legendItem(disc("chosen"), "chosen"), legendItem(disc("front"), "on the front"), legendItem(disc("faint"), "other plans"),
    hasRings ? legendItem(disc("front ring"), "ring: error of the search samples only") : "",
    axes.hasSlow || axes.over ? legendItem(s("path", { class: "faint", d: "M2 1l9 5l-9 5z" }), "beyond the edge") : "",
    axes.hasBroken ? legendItem(s("path", { class: "broken", d: "M2 2l8 8m0 -8l-8 8" }), "outputs not finite") : "",
    legendItem(s("rect", { class: "grip", y: 2, width: 12, height: 9, rx: 4 }), "drag to set a limit"),
  ];
}

