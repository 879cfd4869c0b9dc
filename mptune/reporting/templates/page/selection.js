// The selected point: limits typed, its figures, what it buys, why its groups stay FP32, and the line that takes it.

function selection() {
  const command = find("#pick");
  const fields = [["#limit-error", (value) => limit(value, state.ms)], ["#limit-ms", (value) => limit(state.error, value)]].map(([selector, take]) => {
    const input = find(selector);
    input.addEventListener("input", () => {
      // A number, or a share such as 1% for the error; what is no number above 0 is marked, and gives no command.
      const words = input.value.trim().replace(",", ".");
      const isShare = words.endsWith("%") && input.placeholder.endsWith("%");
      const value = isShare ? Number((Number(words.slice(0, -1)) / 100).toPrecision(12)) : Number(words);
      take(words === "" ? null : Number.isFinite(value) && value > 0 ? value : NaN);
    });
    return input;
  });
  find("form.limits").addEventListener("submit", (event) => event.preventDefault());
  find(".quiet-button").addEventListener("click", () => limit(null, null));
  const copy = find("#copy");
  copy.addEventListener("click", () => {
    const done = (word) => {
      copy.textContent = word;
      setTimeout(() => (copy.textContent = "copy"), 1500);
    };
    // Pages of files have no clipboard in some browsers: then the line is selected, ready for Ctrl-C.
    const mark = () => {
      getSelection().selectAllChildren(command);
      done("selected");
    };
    if (navigator.clipboard) navigator.clipboard.writeText(command.textContent).then(() => done("copied"), mark);
    else mark();
  });
  const rows = [...document.querySelectorAll("#decide tr[data-plan]")].map((row) => [row, plans.find((plan) => plan.plan === row.dataset.plan)]);
  for (const [row, plan] of rows) row.querySelector("button").addEventListener("click", () => select(plan));
  onChange(() => {
    [state.error, state.ms].forEach((value, k) => {
      fields[k].setAttribute("aria-invalid", String(Number.isNaN(value)));
      if (!Number.isNaN(value) && (document.activeElement !== fields[k] || value === null)) fields[k].value = value ?? "";
    });
    find(".selected-body").replaceChildren(...selectedBody(state.plan));
    const wrong = fields.find((field) => field.getAttribute("aria-invalid") === "true");
    command.textContent = wrong ? "" : `mptune pick ${data.run} --plan ${state.plan.plan}`;
    find("#take").hidden = Boolean(wrong) || !state.plan.finite;
    const asked = [state.error === null ? "" : `error <= ${state.error}`, state.ms === null ? "" : `latency <= ${state.ms} ms`].filter(Boolean).join(" and ");
    find("#selected > .bad").hidden = state.met && !wrong;
    find("#selected > .bad").textContent = wrong ? `Not a limit: give a number above 0, ${wrong.placeholder}.` : `No point of the front has ${asked}; this one is the nearest.`;
    for (const [row, plan] of rows) {
      row.classList.toggle("is-selected", plan === state.plan);
      row.querySelector("button").setAttribute("aria-pressed", String(plan === state.plan));
    }
    const reasons = find("#reasons");
    if (reasons) reasons.replaceChildren(h("h3", {}, "Kept in FP32 because"), ...reasonBlocks(state.plan));
  });
}

function selectedBody(plan) {
  const role = roleOf(plan);
  const facts = [
    ["latency", `${plan.ms_text} ms`],
    ["speedup", plan.speedup_text],
    ["error", plan.finite ? formatError(plan.error) : "not finite"], // where both sets count, the note has the other
    ...data.metrics.map((name, k) => [name, plan.metrics[k][2]]),
    [countsName.replace("/", " / "), counts(plan).replace("/", " / ")],
  ];
  const small = [
    plan.interval ? `latency ${plan.interval} (95 %)` : "",
    plan.held_out !== null ? `error held out; ${formatError(plan.search)} on the search samples` : `error on the search samples${plan.ci95 ? `, 95 %: ${formatError(plan.ci95[0])} to ${formatError(plan.ci95[1])}` : ""}`,
    plan.part ? `largest in ${cut(plan.part, 60)}` : "",
    plan.memory !== "-" ? `memory ${plan.memory}` : "",
    plan.sources,
    onFront.has(plan.index) ? "" : "not on the front",
    `proposed by: ${plan.origin}`,
  ];
  return [
    h("h3", {}, role ? `Selected: ${role}` : "Selected", " ", h("code", {}, plan.plan)),
    h("dl", { class: "figures" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("p", { class: "against" }, plan === chosen ? "the plan in chosen/" : plan.against ? `against the chosen plan: ${plan.against}` : ""),
    h("p", { class: "note" }, small.filter(Boolean).join(" \u00b7 ")),
    ...plan.warnings.map((words) => h("p", { class: "bad" }, `${cut(words, 700)}.`)),
  ];
}

/** The FP32 groups of a plan with their reasons; null where nothing is kept of the plan. */
function reasonsOf(plan) {
  const kept = data.reasons.plans[plan.index];
  return kept ? kept.map(([column, because]) => ({ group: groups[column], because: cut(data.reasons.texts[because], 700) })) : null;
}

function reasonBlocks(plan) {
  const kept = reasonsOf(plan);
  if (plan.singles === 0) return [h("p", {}, "No group is in FP32.")];
  if (plan === fp32) return [h("p", {}, "All-FP32 is the baseline.")];
  if (kept === null) return [h("p", {}, onFront.has(plan.index) ? "The run contains no reasons." : "Reasons are kept for the points of the front only.")];
  const list = (items) => h("ul", { class: "kept" }, items.map(({ group, because }) => h("li", {}, h("code", {}, group.id), " ", named(group.name, 60), `: ${because}`)));
  const rest = kept.slice(12);
  return [list(kept.slice(0, 12)), rest.length ? folded(h("details", {}, h("summary", {}, `${rest.length} more`)), () => list(rest)) : ""];
}

