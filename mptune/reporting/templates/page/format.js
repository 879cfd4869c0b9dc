// Numbers as the terminal prints them. Latencies and speedups come as texts: their noise says how many digits.

function num(value) {
  if (typeof value !== "string") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? NaN;
}

function formatError(value) {
  if (value === null || value === undefined) return "-";
  if (!Number.isFinite(value)) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size < 0.1 || size >= 1000 ? exponent(value) : String(Number(value.toPrecision(3)));
}

function exponent(value) {
  const [digits, power] = value.toExponential(1).split("e");
  const sign = power.startsWith("-") ? "-" : "+";
  return `${digits}e${sign}${power.replace(/[-+]/, "").padStart(2, "0")}`;
}

function formatPercent(share) {
  const percent = Math.abs(share) * 100;
  return `${percent >= 9.95 ? percent.toFixed(0) : Number(percent.toPrecision(2))} %`;
}

function formatDuration(seconds) {
  const total = Math.max(0, Math.round(seconds));
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
}

/** Any number of the evidence: whole ones as they are, others with four digits. */
function formatNumber(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? exponent(value) : String(Number(value.toPrecision(4)));
}

/** A long text with its middle left out: names differ at their ends. */
function cut(text, most) {
  const letters = [...text];
  if (letters.length <= most) return text;
  const head = Math.floor((most - 1) / 3);
  return letters.slice(0, head).join("") + "\u2026" + letters.slice(letters.length - (most - 1 - head)).join("");
}

/** A sentence of findings and warnings, with what stands in backticks as code; names in it may be of any length. */
function prose(text) {
  return cut(text, 700).split("`").map((part, k) => (k % 2 ? h("code", {}, part) : part));
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** A name of a model's: whole in the title, shortened in the text. */
function named(name, most) {
  return h("code", { title: name.length > most ? name.slice(0, 2000) : null }, cut(name, most));
}

