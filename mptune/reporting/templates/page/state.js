// The data, and what is selected. Whoever shows the selection listens with `onChange`.

const data = JSON.parse(document.getElementById("data").textContent);
const groups = data.groups;
for (const group of groups) {
  for (const name of ["error", "gain", "casts"]) group[name] = num(group[name]);
}

const plans = data.plans.map((row, index) => {
  const plan = { index };
  data.plan_fields.forEach((field, column) => (plan[field] = num0(row[column], field)));
  plan.error = plan.held_out ?? plan.search;
  plan.halves = [...plan.bits].filter((letter) => letter !== "f").length;
  plan.singles = plan.bits.length - plan.halves;
  plan.brains = [...plan.bits].filter((letter) => letter === "b").length;
  plan.finite = Boolean(plan.finite);
  return plan;
});

function num0(value, field) {
  return ["ms", "low", "high", "speedup", "search", "held_out"].includes(field) ? num(value) : field === "ci95" && value ? value.map(num) : value;
}

const hasBf16 = plans.some((plan) => plan.brains);
const countsName = hasBf16 ? "FP16+BF16/FP32" : "FP16/FP32";

/** How many groups are FP16, BF16 where any plan has it, and FP32. */
function counts(plan) {
  return `${hasBf16 ? `${plan.halves - plan.brains}+${plan.brains}` : plan.halves}/${plan.singles}`;
}

const front = data.front.map((index) => plans[index]);
const chosen = data.chosen === null ? null : plans[data.chosen];
const fp32 = plans[data.fp32];
const fp16 = data.fp16 === null ? null : plans[data.fp16];
const onFront = new Set(data.front);

/** What a plan is called beside its id; empty for most. */
function roleOf(plan) {
  const roles = [];
  if (plan === chosen) roles.push("chosen");
  if (plan === fp32) roles.push("all-FP32");
  if (plan === fp16) roles.push(data.fp16_name);
  return roles.join(", ");
}

function precisionOf(plan, column) {
  return { h: "fp16", f: "fp32", b: "bf16" }[plan.bits[column]];
}

function describePlan(plan) {
  const role = roleOf(plan);
  return `${role ? role + ": " : ""}${plan.ms_text} ms, error ${plan.finite ? errorText(plan) : "not finite"}, plan ${plan.plan}`;
}

/** The error that choices go by; where that of the search samples is larger beyond noise, both. */
function errorText(plan) {
  return plan.search_larger ? `${formatError(plan.error)} on held-out samples, ${formatError(plan.search)} on the search samples` : formatError(plan.error);
}

// -- the selection ----------------------------------------------------------------------------------------------------

const state = { plan: chosen ?? front[0] ?? fp32, error: null, ms: null, by: "start", met: true, group: null, samples: "choice" };
const listeners = [];

function onChange(listener) {
  listeners.push(listener);
}

function change(changes) {
  Object.assign(state, changes);
  for (const listener of listeners) listener(state);
}

function select(plan) {
  change({ plan, by: "plan", error: null, ms: null, met: true });
}

/** Take the fastest point within these limits, the most exact without one on the error (null: none; NaN: no number). */
function limit(error, ms) {
  if (Number.isNaN(error) || Number.isNaN(ms)) change({ by: "limits", error, ms, met: true });
  else if (error === null && ms === null) change({ plan: chosen ?? state.plan, by: "start", error, ms, met: true });
  else {
    const [plan, met] = pickByLimits(error, ms);
    change({ plan: plan ?? state.plan, by: "limits", error, ms, met: met && plan !== null });
  }
}

function pickByLimits(error, ms) {
  const excess = (p) => Math.max(1, error === null ? 1 : Math.max(p.error, p.search) / error, ms === null ? 1 : p.ms / ms);
  const meeting = front.filter((p) => excess(p) <= 1);
  const least = (list, ...keys) =>
    list.reduce((best, p) => (best === null || keys.reduce((d, key) => d || key(p) - key(best), 0) < 0 ? p : best), null);
  if (!meeting.length) return [least(front, excess), false];
  if (error === null) return [least(meeting, (p) => p.error, (p) => p.ms), true];
  return [least(meeting, (p) => p.ms, (p) => p.error), true];
}

/** The words of the command that writes the selected plan into chosen/; each may stand in a shell as it is. */
function pickWords() {
  return ["mptune", "pick", data.run, "--plan", state.plan.plan];
}

