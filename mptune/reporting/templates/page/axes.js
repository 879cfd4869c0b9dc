// Where values lie in the chart. One far point does not squeeze the others: it is drawn at the edge.

const EXACT = 1e-6;

/** The error that the chart shows of a plan: the one that choices go by, or that of the search samples for all alike. */
function shownError(plan) {
  return state.samples === "search" ? plan.search : plan.error;
}

/** Lowest and highest of the values without the few that lie far outside: by more than twice the span of the rest. */
function core(values, dropLow) {
  const v = [...new Set(values.filter(Number.isFinite))].sort((a, b) => a - b);
  let low = 0;
  let high = v.length - 1;
  while (high - low >= 3 && v[high] - v[high - 1] > 2 * (v[high - 1] - v[low])) high -= 1;
  while (dropLow && high - low >= 3 && v[low + 1] - v[low] > 2 * (v[high] - v[low + 1])) low += 1;
  return v.length ? [v[low], v[high]] : null;
}

/** The axes for a drawing of this size, in pixels. */
function makeAxes(width, height) {
  const main = [...new Set([...front, fp32, fp16, chosen].filter(Boolean))];
  const [lowMs, highMs] = core(main.map((p) => p.ms), false) || [0, 1];
  const positive = main.filter((p) => p.finite && shownError(p) > 0).map(shownError).sort((a, b) => a - b);
  // An error of FP32's own rounding, a decade and more below all others, is as good as exact.
  const kept = positive.filter((e, k) => !(e < EXACT && positive.slice(k + 1).some((other) => other >= EXACT) && positive.find((other) => other > e) > 10 * e));
  const [lowLog, highLog] = core((kept.length ? kept : [1e-4, 1e-1]).map(Math.log10), true) || [-4, -1];
  const spanLog = Math.max(highLog - lowLog, 0.3);
  const low = lowLog - 0.08 * spanLog;
  const high = highLog + 0.08 * spanLog;
  const spanMs = highMs - lowMs || highMs * 0.1 || 1;
  const fromMs = Math.max(0, lowMs - 0.07 * spanMs);
  const toMs = highMs + 0.07 * spanMs;
  const errorOf = (p) => (p.finite ? shownError(p) : Infinity);
  const over = plans.some((p) => p.finite && shownError(p) > 10 ** high);
  const hasExact = plans.some((p) => p.finite && (shownError(p) <= 0 || Math.log10(shownError(p)) < low));
  const hasBroken = plans.some((p) => !p.finite && Number.isFinite(p.ms));
  const hasSlow = plans.some((p) => p.ms > toMs);
  const band = 26;
  const fine = high - low < 1.6 ? 14 : 0; // labels such as 5 x 10^-4 are wider
  const box = { left: 62 + fine, right: width - (hasSlow ? 30 : 14), top: 14, bottom: height - 46 };
  const inner = { top: box.top + (hasBroken ? band : 0) + (over ? band : 0), bottom: box.bottom - (hasExact ? band : 0), right: box.right - (hasSlow ? 4 : 0) };
  const x = (ms) => box.left + ((Math.min(ms, toMs) - fromMs) / (toMs - fromMs)) * (inner.right - box.left) + (ms > toMs ? 16 : 0);
  const y = (error) => {
    if (!Number.isFinite(error)) return box.top + band / 2;
    const log = error > 0 ? Math.log10(error) : -Infinity;
    if (log < low) return box.bottom - band / 2;
    if (log > high) return box.top + (hasBroken ? band : 0) + band / 2;
    return inner.bottom - ((log - low) / (high - low)) * (inner.bottom - inner.top);
  };
  return {
    width, height, box, inner, band, hasExact, hasBroken, over, hasSlow, fromMs, toMs, low, high, x, y,
    px: (p) => x(p.ms),
    py: (p) => y(errorOf(p)),
    at: (p) => [x(p.ms), y(errorOf(p))],
    msAt: (px) => fromMs + ((px - box.left) / (inner.right - box.left)) * (toMs - fromMs),
    errorAt: (py) => 10 ** (low + ((inner.bottom - py) / (inner.bottom - inner.top)) * (high - low)),
  };
}

/** Round numbers between two bounds, about `count` of them. */
function ticks(low, high, count) {
  const span = (high - low) / count;
  const magnitude = 10 ** Math.floor(Math.log10(span));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * magnitude).find((m) => m >= span * (1 - 1e-9));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12); k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** Ticks of a log axis: decades, and 2 and 5 between them where there are few. */
function logTicks(low, high) {
  const steps = high - low < 1.6 ? [1, 2, 5] : [1];
  const found = [];
  for (let decade = Math.floor(low); decade <= Math.ceil(high); decade += 1) {
    for (const step of steps) {
      const log = decade + Math.log10(step);
      if (log >= low && log <= high) found.push({ log, text: step === 1 ? power(decade) : `${step}\u00b7${power(decade)}` });
    }
  }
  const every = Math.ceil(found.length / 8);
  return found.filter((_, k) => k % every === 0);
}

function power(decade) {
  return "10" + [...String(decade)].map((c) => (c === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[Number(c)])).join("");
}

