// Latency against error: every plan, the front, two limits to drag, and the selected point.

const BAND = 26;
const EXACT = 1e-6; // errors of FP32's own rounding

/** Where values lie: the axes span the front and the baselines; what is beyond stands at the edge. */
function makeAxes(width, height) {
  const main = [...new Set([...front, fp32, fp16, chosen, tf32])].filter((p) => p && Number.isFinite(p.ms));
  const logs = main.filter((p) => p.finite && p.error >= EXACT).map((p) => Math.log10(p.error));
  const [lowLog, highLog] = logs.length ? [Math.min(...logs), Math.max(...logs)] : [-4, -1];
  const [lowMs, highMs] = [Math.min(...main.map((p) => p.ms)), Math.max(...main.map((p) => p.ms))];
  const [spanLog, spanMs] = [Math.max(highLog - lowLog, 0.3), highMs - lowMs || highMs * 0.1 || 1];
  const [low, high] = [lowLog - 0.08 * spanLog, highLog + 0.08 * spanLog];
  const [fromMs, toMs] = [Math.max(0, lowMs - 0.07 * spanMs), highMs + 0.07 * spanMs];
  const over = plans.some((p) => p.finite && Math.log10(p.error) > high);
  const hasExact = plans.some((p) => p.finite && (p.error <= 0 || Math.log10(p.error) < low));
  const hasBroken = plans.some((p) => !p.finite && Number.isFinite(p.ms));
  const hasSlow = plans.some((p) => p.ms > toMs);
  const left = logTicks(low, high).some(({ words }) => words.includes("\u00b7")) ? 76 : 62; // labels such as 5 x 10^-4 are wider
  const box = { left, right: width - (hasSlow ? 30 : 14), top: 14, bottom: height - 46 };
  const inner = { top: box.top + BAND * (hasBroken + over), bottom: box.bottom - BAND * hasExact, right: box.right - 4 * hasSlow };
  const x = (ms) => box.left + ((Math.min(ms, toMs) - fromMs) / (toMs - fromMs)) * (inner.right - box.left) + (ms > toMs ? 16 : 0);
  const y = (error) => {
    if (!Number.isFinite(error)) return box.top + BAND / 2;
    const log = error > 0 ? Math.log10(error) : -Infinity;
    if (log < low) return box.bottom - BAND / 2;
    if (log > high) return box.top + BAND * (hasBroken + 0.5);
    return inner.bottom - ((log - low) / (high - low)) * (inner.bottom - inner.top);
  };
  return {
    width, height, box, inner, main, hasExact, hasBroken, over, hasSlow, fromMs, toMs, low, high, x, y,
    at: (p) => [x(p.ms), y(p.finite ? p.error : Infinity)],
    msAt: (px) => fromMs + ((px - box.left) / (inner.right - box.left)) * (toMs - fromMs),
    errorAt: (py) => 10 ** (low + ((inner.bottom - py) / (inner.bottom - inner.top)) * (high - low)),
  };
}

/** Round numbers between two bounds, about `count` of them. */
function ticks(low, high, count) {
  const magnitude = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * magnitude).find((m) => m >= ((high - low) / count) * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

/** Ticks of a log axis, two at least: decades, with 2 and 5 between them where these are few, else round numbers. */
function logTicks(low, high) {
  const power = (decade) => "10" + [...String(decade)].map((c) => (c === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[Number(c)])).join("");
  const between = (steps) => {
    const decades = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, k) => Math.floor(low) + k);
    return decades.flatMap((decade) => steps.map((step) => decade + Math.log10(step))).filter((log) => log >= low && log <= high);
  };
  let logs = high - low < 1.6 ? [] : between([1]);
  if (logs.length < 2) logs = between([1, 2, 5]);
  if (logs.length < 2) logs = ticks(10 ** low, 10 ** high, 4).map(Math.log10);
  return logs.filter((_, k) => k % Math.ceil(logs.length / 8) === 0).map((log) => {
    const decade = Math.floor(log + 1e-9);
    const step = Number((10 ** (log - decade)).toPrecision(4));
    return { log, words: step === 1 ? power(decade) : `${step}\u00b7${power(decade)}` };
  });
}

function grid(axes) {
  const { box, inner } = axes;
  const line = (x1, x2, y1, y2) => s("line", { class: "grid", x1, x2, y1, y2 });
  const parts = [];
  for (const value of ticks(axes.fromMs, axes.toMs, Math.max(3, Math.floor((box.right - box.left) / 90)))) {
    parts.push(line(axes.x(value), axes.x(value), box.top, box.bottom), text(axes.x(value), box.bottom + 20, "middle", String(value)));
  }
  for (const { log, words } of logTicks(axes.low, axes.high)) {
    const y = axes.y(10 ** log);
    parts.push(line(box.left, box.right, y, y), text(box.left - 12, y + 4, "end", words));
  }
  const bands = [[axes.hasBroken, box.top, "Inf"], [axes.over, inner.top - BAND, "far"], [axes.hasExact, inner.bottom + 3, "exact"]];
  for (const [isThere, y, words] of bands) {
    if (isThere) parts.push(s("rect", { class: "band", x: box.left, y, width: box.right - box.left, height: BAND - 3 }), text(box.left - 12, y + BAND / 2 + 2, "end", words));
  }
  const place = data.latency_is === "measured" ? "measured" : axes.width < 500 ? "predicted" : `predicted for ${cut(data.target, 28)}`;
  const middle = (box.top + box.bottom) / 2;
  parts.push(text((box.left + box.right) / 2, axes.height - 6, "middle", `latency, ms (${place})`, "axis"));
  parts.push(s("text", { class: "axis", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, `error, ${cut(data.metric, 30)}`));
  return parts;
}

/** A disc: error on held-out samples; a ring: on the search samples alone; a triangle: beyond the edge; a cross: not finite. */
function mark(axes, plan, style, radius) {
  const [x, y] = axes.at(plan);
  const lines = [`${plan.ms_text} ms, ${plan.speedup_text}`, `error ${errorText(plan)}`, `${counts(plan)} groups ${countsName}`, `${roleOf(plan)} ${plan.plan}`];
  const title = s("title", {}, lines.join("\n"));
  if (!plan.finite) return s("path", { class: "broken", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` }, title);
  if (plan.ms > axes.toMs) return s("path", { class: style, d: `M${x - 4} ${y - 5}l9 5l-9 5z` }, title);
  if (Math.log10(plan.error) > axes.high) return s("path", { class: style, d: `M${x - 5} ${y + 4}l5 -9l5 9z` }, title);
  const ring = hasHeldOut && plan.held_out === null && style !== "faint" ? " ring" : "";
  return s("circle", { class: style + ring, cx: x.toFixed(1), cy: y.toFixed(1), r: radius }, title);
}

function points(axes) {
  const style = (p) => (p === chosen ? "chosen" : onFront.has(p.index) ? "front" : "baseline");
  const faint = plans.filter((p) => !axes.main.includes(p) && Number.isFinite(p.ms)).map((p) => mark(axes, p, "faint", 3.5));
  const circles = [...axes.main].sort((a, b) => (a === chosen) - (b === chosen)).map((p) => mark(axes, p, style(p), p === chosen ? 7 : 5));
  // From each point to the right until the next, more exact one: what can be had at that latency.
  const steps = front.map(axes.at).sort((a, b) => a[0] - b[0]).map(([x, y], k) => (k ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`));
  const staircase = s("path", { class: "staircase", d: steps.join("") });
  return s("g", { class: faint.length > 400 ? "many" : null }, faint, staircase, circles, labels(axes));
}

/** Names of the baselines, the chosen plan and those beside it, each where it covers the least. */
function labels(axes) {
  const covered = axes.main.map(axes.at).map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
  const names = new Map([chosen, fp32, fp16, tf32].filter(Boolean).map((plan) => [plan, roleOf(plan)]));
  for (const { plan, role } of data.neighbours) names.set(plans[plan], [names.get(plans[plan]), role].filter(Boolean).join(", "));
  return [...names].filter(([plan]) => Number.isFinite(plan.ms)).map(([plan, words]) => {
    const [x, y] = axes.at(plan);
    const wide = words.length * 6.9;
    const places = [[x + 11, y - 9], [x + 11, y + 17], [x - 11 - wide, y - 9], [x - 11 - wide, y + 17], [x - wide / 2, y - 16], [x - wide / 2, y + 24]];
    const area = ([left, base]) => [left - 2, base - 12, left + wide + 2, base + 4];
    const cost = (place) => {
      const [left, top, right, bottom] = area(place);
      const isOutside = left < axes.box.left || right > axes.width || top < 0 || bottom > axes.box.bottom;
      return (isOutside ? 10 : 0) + covered.filter((c) => c[0] < right && c[2] > left && c[1] < bottom && c[3] > top).length;
    };
    const best = places.reduce((a, b) => (cost(b) < cost(a) ? b : a));
    covered.push(area(best));
    return text(...best, "start", words, plan === chosen ? "label chosen-label" : "label");
  });
}

/** The selected point, with the 95 % intervals that are not held-out ones. */
function selectedMark(axes) {
  const plan = state.plan;
  if (!Number.isFinite(plan.ms)) return [];
  const [x, y] = axes.at(plan);
  const parts = [s("circle", { class: "halo", cx: x, cy: y, r: 11 })];
  if (!plan.finite || plan.ms > axes.toMs) return parts;
  const [x1, x2] = [Math.max(axes.box.left, axes.x(plan.low)), axes.x(Math.min(plan.high, axes.toMs))];
  if (x2 - x1 > 2) parts.push(s("line", { class: "whisker", x1, x2, y1: y, y2: y }));
  if (plan.ci95 && plan.held_out === null && plan.ci95[0] > 0) {
    const [y1, y2] = plan.ci95.map((e) => Math.min(axes.inner.bottom, Math.max(axes.inner.top, axes.y(e))));
    if (y1 - y2 > 2) parts.push(s("line", { class: "whisker", x1: x, x2: x, y1, y2 }));
  }
  return parts;
}

/** The two limits: what is beyond them is shaded; their handles sit on the axes, where they cover no point. */
function limitMarks(axes, frame) {
  const { box, inner } = axes;
  const parts = [];
  const yError = state.error > 0 ? Math.min(box.bottom, Math.max(box.top, axes.y(state.error))) : box.top;
  const xMs = state.ms > 0 ? Math.min(box.right, Math.max(box.left, axes.x(state.ms))) : box.right;
  const shade = (x, y, width, height, line) => parts.push(s("rect", { class: "beyond", x, y, width, height }), s("line", { class: "limit", ...line }));
  if (state.error > 0) shade(box.left, box.top, box.right - box.left, yError - box.top, { x1: box.left, x2: box.right, y1: yError, y2: yError });
  if (state.ms > 0) shade(xMs, box.top, box.right - xMs, box.bottom - box.top, { x1: xMs, x2: xMs, y1: box.top, y2: box.bottom });
  const drag = (move) => (event) => {
    event.preventDefault();
    const rect = frame.getBoundingClientRect();
    const end = new AbortController();
    window.addEventListener("pointermove", (e) => move(e.clientX - rect.left, e.clientY - rect.top), { signal: end.signal });
    for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, () => end.abort(), { signal: end.signal });
  };
  const toError = (px, py) => limit(py <= inner.top - 4 ? null : Number(axes.errorAt(Math.min(py, inner.bottom)).toPrecision(2)), state.ms);
  const toMs = (px) => limit(state.error, px >= inner.right - 2 ? null : Number(axes.msAt(Math.max(px, box.left + 1)).toPrecision(3)));
  const handle = (style, x, y, width, height, what, move) =>
    s("g", { class: `handle ${style}`, onpointerdown: drag(move) }, s("rect", { class: "touch", x: x - 18, y: y - 18, width: 36, height: 36 }), s("rect", { class: "grip", x: x - width / 2, y: y - height / 2, width, height, rx: 5 }), s("title", {}, what));
  return [...parts, handle("error-handle", box.left, yError, 18, 12, "drag: largest error", toError), handle("ms-handle", xMs, box.bottom, 12, 18, "drag: largest latency", toMs)];
}

function chart() {
  const frame = find(".chart");
  const order = [...front].sort((a, b) => a.ms - b.ms);
  let axes = null;
  let live = null;
  const show = () => {
    say(frame, order.indexOf(state.plan), describePlan(state.plan));
    if (live) live.replaceChildren(...limitMarks(axes, frame), ...selectedMark(axes));
  };
  walker(frame, "Points of the front, the fastest first", order.length - 1, () => order.indexOf(state.plan), (k) => order[k] && select(order[k]));
  drawn(frame, (width) => {
    axes = makeAxes(width, Math.round(Math.min(460, Math.max(300, width * 0.58))));
    live = s("g", {});
    frame.replaceChildren(picture(width, axes.height, "", grid(axes), points(axes), live));
    find(".chart-box .legend").replaceChildren(...legend(axes));
    show();
  });
  onChange(show);
  frame.addEventListener("click", (event) => {
    if (event.target.closest(".handle")) return;
    const rect = frame.getBoundingClientRect();
    const near = plans.filter((plan) => Number.isFinite(plan.ms)).map((plan) => {
      const [x, y] = axes.at(plan);
      // A point of the front wins over one that lies behind it.
      return [Math.hypot(x - event.clientX + rect.left, y - event.clientY + rect.top) + (onFront.has(plan.index) || roleOf(plan) ? 0 : 5), plan];
    });
    const [distance, plan] = near.reduce((a, b) => (b[0] < a[0] ? b : a), [26, null]);
    if (plan && distance < 26) select(plan);
  });
}

/** What the marks mean that are there. */
function legend(axes) {
  const item = (icon, words) => h("span", {}, fill(picture(12, 12, "", icon), { class: "icon" }, []), words);
  const disc = (style) => s("circle", { class: style, cx: 6, cy: 6, r: 5 });
  const parts = [item(disc("chosen"), "chosen"), item(disc("front"), "on the front"), item(disc("faint"), "other plans")];
  if (hasHeldOut && axes.main.some((p) => p.finite && p.held_out === null)) parts.push(item(disc("front ring"), "ring: error of the search samples only"));
  if (axes.hasSlow || axes.over) parts.push(item(s("path", { class: "faint", d: "M2 1l9 5l-9 5z" }), "beyond the edge"));
  if (axes.hasBroken) parts.push(item(s("path", { class: "broken", d: "M2 2l8 8m0 -8l-8 8" }), "outputs not finite"));
  return [...parts, item(s("rect", { class: "grip", y: 2, width: 12, height: 9, rx: 4 }), "drag to set a limit")];
}

