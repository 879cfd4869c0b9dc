// Elements, numbers, the data, and what is selected. Text only ever becomes text nodes and attributes.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== "") node.append(child);
  return node;
}

/** An HTML element. Attributes that begin with "on" are listeners; null leaves one out. */
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
const s = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const find = (selector) => document.querySelector(selector);

/** A drawing; without a label it says nothing that its frame does not say. */
function picture(width, height, label, ...children) {
  const role = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...role }, ...children);
}

/** A tick or label of a drawing. */
const text = (x, y, anchor, words, style = "tick") => s("text", { class: style, x, y, "text-anchor": anchor }, words);

/** Draw whenever the width of the frame changes; `draw` is given the width in pixels. */
function drawn(frame, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(frame.clientWidth);
    if (width && width !== last) draw((last = width));
  }).observe(frame);
}

/** Fill a folded block when it is first opened: a long table costs nothing before. */
function folded(box, build) {
  box.addEventListener("toggle", () => box.open && box.append(build()), { once: true });
  return box;
}

/** A slider for the keyboard: arrows, Home and End walk through the places 0 to last. */
function walker(frame, label, last, place, go) {
  fill(frame, { role: "slider", tabindex: "0", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": Math.max(0, last), "aria-valuenow": 0 }, []);
  frame.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    go(Math.min(last, Math.max(0, place() + steps[event.key])));
  });
}

const say = (frame, place, words) => fill(frame, { "aria-valuenow": Math.max(0, place), "aria-valuetext": words }, []);

// -- numbers, as the terminal prints them; latencies and speedups come as texts: their noise says how many digits -------

const num = (value) => (typeof value === "string" ? { inf: Infinity, "-inf": -Infinity }[value] ?? NaN : value);

function exponent(value) {
  const [digits, sign, power] = value.toExponential(1).split(/e([-+])/);
  return `${digits}e${sign}${power.padStart(2, "0")}`;
}

function formatError(value) {
  if (value === null) return "-";
  if (!Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  return size && (size < 0.1 || size >= 1000) ? exponent(value) : String(Number(value.toPrecision(3)));
}

function formatNumber(value) {
  const size = Math.abs(value);
  return Number.isInteger(value) || (size >= 1e-3 && size < 1e6) ? String(Number(value.toPrecision(4))) : exponent(value);
}

/** A long text with its middle left out: names differ at their ends. */
function cut(words, most) {
  const letters = [...words];
  const head = Math.floor(most / 3);
  return letters.length <= most ? words : `${letters.slice(0, head).join("")}\u2026${letters.slice(head + 1 - most).join("")}`;
}

/** A name of a model's: whole in the title, shortened in the text. */
const named = (name, most) => h("code", { title: name.length > most ? name.slice(0, 2000) : null }, cut(name, most));

// -- the data ---------------------------------------------------------------------------------------------------------

const data = JSON.parse(find("#data").textContent);
const groups = data.groups.map((group) => ({ ...group, error: num(group.error), gain: num(group.gain), casts: num(group.casts) }));
const NUMBERS = ["ms", "low", "high", "speedup", "search", "held_out"];

function planOf(row, index) {
  const plan = { index };
  data.plan_fields.forEach((field, column) => (plan[field] = NUMBERS.includes(field) ? num(row[column]) : row[column]));
  plan.ci95 = plan.ci95 && plan.ci95.map(num);
  plan.error = plan.held_out ?? plan.search;
  plan.singles = [...plan.bits].filter((letter) => letter === "f").length;
  plan.brains = [...plan.bits].filter((letter) => letter === "b").length;
  plan.halves = plan.bits.length - plan.singles;
  return plan;
}

const plans = data.plans.map(planOf);
const at = (index) => (index === null ? null : plans[index]);
const [chosen, fp32, fp16] = [at(data.chosen), at(data.fp32), at(data.fp16)];
const tf32 = data.tf32 && planOf(data.tf32, -1); // the plan of all-FP32: a point that cannot be selected
const front = data.front.map(at);
const onFront = new Set(data.front);
const hasBf16 = plans.some((plan) => plan.brains);
const hasHeldOut = plans.some((plan) => plan.held_out !== null);
const countsName = hasBf16 ? "FP16+BF16/FP32" : "FP16/FP32";
const counts = (plan) => `${hasBf16 ? `${plan.halves - plan.brains}+${plan.brains}` : plan.halves}/${plan.singles}`;
const precisionOf = (plan, column) => ({ h: "fp16", f: "fp32", b: "bf16" })[plan.bits[column]];

/** What a plan is called beside its id; empty for most. */
function roleOf(plan) {
  const roles = [[chosen, "chosen"], [fp32, "all-FP32"], [fp16, data.fp16_name], [tf32, "TF32"]];
  return roles.filter(([one]) => one && one === plan).map(([, name]) => name).join(", ");
}

const describePlan = (plan) => `${[roleOf(plan), ""].filter(Boolean).join()} ${plan.ms_text} ms, error ${errorText(plan)}, plan ${plan.plan}`.trim();

/** The error that choices go by; where that of the search samples is larger beyond noise, both. */
function errorText(plan) {
  if (!plan.finite) return "not finite";
  return plan.search_larger ? `${formatError(plan.error)} on held-out samples, ${formatError(plan.search)} on the search samples` : formatError(plan.error);
}

// -- the selection: whoever shows it listens with `onChange` ------------------------------------------------------------
const state = { plan: chosen ?? front[0] ?? fp32, error: null, ms: null, met: true, group: null };
const listeners = [];
const onChange = (listener) => listeners.push(listener);

function change(changes) {
  Object.assign(state, changes);
  for (const listener of listeners) listener(state);
}

const select = (plan) => change({ plan, error: null, ms: null, met: true });

/** Take the fastest point within these limits, the most exact without one on the error (null: none; NaN: no number). */
function limit(error, ms) {
  if (Number.isNaN(error) || Number.isNaN(ms)) return change({ error, ms, met: true });
  if (error === null && ms === null) return change({ plan: chosen ?? state.plan, error, ms, met: true });
  const excess = (p) => Math.max(1, error === null ? 1 : Math.max(p.error, p.search) / error, ms === null ? 1 : p.ms / ms);
  const meeting = front.filter((p) => excess(p) <= 1);
  const by = !meeting.length ? (p) => [excess(p), 0] : error === null ? (p) => [p.error, p.ms] : (p) => [p.ms, p.error];
  const order = [...(meeting.length ? meeting : front)].sort((a, b) => by(a)[0] - by(b)[0] || by(a)[1] - by(b)[1]);
  return change({ plan: order[0] ?? state.plan, error, ms, met: meeting.length > 0 });
}

