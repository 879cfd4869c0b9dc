// The selected point: limits typed, its figures, what it buys, why its groups stay FP32, and the line that takes it.

function selectionPanel() {
  const errorBox = limitInput("limit-error", "largest error", "e.g. 1e-3 or 1%", (value) => limit(value, state.ms));
  const msBox = limitInput("limit-ms", "largest latency, ms", `e.g. ${fp32.ms_text}`, (value) => limit(state.error, value));
  const clear = h("button", { type: "button", class: "quiet-button", onclick: () => limit(null, null) }, "back to the chosen plan");
  const body = h("div", { class: "selected-body", "aria-live": "polite" });
  const command = h("code", { id: "pick" });
  const copy = h("button", { type: "button", id: "copy", onclick: () => copyText(command.textContent, copy) }, "copy");
  const take = h("div", {}, h("p", { class: "note" }, "To take it, in the folder that holds ", h("code", {}, data.run), ":"), h("div", { class: "command" }, command, copy));
  const none = h("p", { class: "bad", hidden: true });
  const node = h(
    "div",
    { class: "selected", id: "selected" },
    h("form", { class: "limits", onsubmit: (event) => event.preventDefault() }, errorBox.node, msBox.node, clear),
    none,
    body,
    take,
  );
  onChange(() => {
    errorBox.show(state.error);
    msBox.show(state.ms);
    body.replaceChildren(...selectedBody(state.plan));
    const wrong = Number.isNaN(state.error) ? errorBox : Number.isNaN(state.ms) ? msBox : null;
    // Short words are not broken at their hyphens.
    command.replaceChildren(...(wrong ? [] : pickWords()).flatMap((word, k) => [k ? " " : "", h("span", { class: word.length < 28 ? "word" : null }, word)]));
    take.hidden = wrong !== null || !state.plan.finite;
    none.hidden = state.met && wrong === null;
    none.textContent = wrong ? wrong.rule : `No point of the front has ${limitText()}; this one is the nearest.`;
  });
  return node;
}

function limitText() {
  const parts = [state.error === null ? "" : `error <= ${state.error}`, state.ms === null ? "" : `latency <= ${state.ms} ms`];
  return parts.filter(Boolean).join(" and ");
}

/** A number typed, or a share such as 1%; what is no number above 0 is marked, and gives no command. */
function limitInput(id, label, hint, take) {
  const input = h("input", { id, type: "text", inputmode: "decimal", autocomplete: "off", placeholder: hint });
  input.addEventListener("input", () => {
    const text = input.value.trim().replace(",", ".");
    const isShare = text.endsWith("%") && hint.endsWith("%");
    const value = isShare ? Number((Number(text.slice(0, -1)) / 100).toPrecision(12)) : Number(text);
    take(text === "" ? null : Number.isFinite(value) && value > 0 ? value : NaN);
  });
  const show = (value) => {
    input.setAttribute("aria-invalid", String(Number.isNaN(value)));
    if (Number.isNaN(value) || (document.activeElement === input && value !== null)) return;
    input.value = value === null ? "" : String(value);
  };
  return { node: h("label", { for: id }, h("span", {}, label), input), show, rule: `Not a limit: give a number above 0, ${hint}.` };
}

function selectedBody(plan) {
  const role = roleOf(plan);
  const against = plan === chosen ? "the plan in chosen/" : chosen ? `against the chosen plan: ${plan.against}` : "";
  const facts = [
    ["latency", `${plan.ms_text} ms`],
    ["speedup", plan.speedup_text],
    ["error", plan.finite ? errorText(plan) : "not finite"],
    ...data.metrics.map((name, k) => [name, plan.metrics[k][2]]),
    [countsName.replace("/", " / "), counts(plan).replace("/", " / ")],
  ];
  const small = [
    plan.interval ? `latency ${plan.interval} (95 %)` : "",
    plan.held_out === null ? `error on the search samples${plan.ci95 ? `, 95 %: ${formatError(plan.ci95[0])} to ${formatError(plan.ci95[1])}` : ""}` : `error held out; ${formatError(plan.search)} on the search samples`,
    plan.part ? `largest in ${cut(plan.part, 60)}` : "",
    plan.memory !== "-" ? `memory ${plan.memory}` : "",
    plan.sources,
    onFront.has(plan.index) ? "" : "not on the front",
    role.toLowerCase().includes(plan.origin.toLowerCase()) ? "" : `proposed by: ${plan.origin}`,
  ].filter(Boolean);
  return [
    h("h3", {}, role ? `Selected: ${role}` : "Selected", " ", h("code", {}, plan.plan)),
    h("dl", { class: "figures" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("p", { class: "against" }, against),
    h("p", { class: "note" }, small.join(" \u00b7 ")),
    plan.warnings.map((text) => h("p", { class: "bad" }, prose(text) + ".")),
  ].flat();
}

function copyText(text, button) {
  const done = (word) => {
    button.textContent = word;
    setTimeout(() => (button.textContent = "copy"), 1500);
  };
  // Pages of files have no clipboard in some browsers: then the line is selected, ready for Ctrl-C.
  const mark = () => {
    const range = document.createRange();
    range.selectNodeContents(document.getElementById("pick"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    done("selected");
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => done("copied"), mark);
  else mark();
}

// -- why groups stay FP32 ---------------------------------------------------------------------------------------------

/** The FP32 groups of a plan with their reasons; null where nothing is kept of the plan. */
function reasonsOf(plan) {
  const kept = data.reasons.plans[plan.index];
  if (!kept) return null;
  return kept.map(([column, word, text]) => ({ group: groups[column], word: data.reasons.words[word], because: data.reasons.texts[text] }));
}

const SHOWN_REASONS = 12;

function reasonsBlock() {
  const frame = h("div", { class: "reasons", id: "reasons" });
  onChange(({ plan }) => frame.replaceChildren(...reasonBlocks(plan)));
  return frame;
}

function reasonBlocks(plan) {
  const kept = reasonsOf(plan);
  const heading = h("h3", {}, "Kept in FP32 because");
  if (plan.singles === 0) return [heading, h("p", {}, "No group is in FP32.")];
  if (plan === fp32) return [heading, h("p", {}, "All-FP32 is the baseline.")];
  if (kept === null) {
    const text = onFront.has(plan.index) ? "The run holds nothing to explain it with." : "Reasons are kept for the points of the front only.";
    return [heading, h("p", {}, text)];
  }
  const list = (items) => h("ul", { class: "kept" }, items.map(keptItem));
  const rest = kept.slice(SHOWN_REASONS);
  return [heading, list(kept.slice(0, SHOWN_REASONS)), rest.length ? folded("more-reasons", `${rest.length} more`, () => list(rest)) : null].filter(Boolean);
}

function keptItem({ group, word, because }) {
  return h("li", {}, h("code", {}, group.id), " ", named(group.name, 60), `: ${prose(because || word)}`);
}
