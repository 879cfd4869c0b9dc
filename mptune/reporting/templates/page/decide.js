// What to ship: at most six points, each with what it buys over the chosen one.

function decideSection() {
  const box = section("decide", "What to ship");
  if (data.findings.some((f) => f.severity === "error")) box.append(h("p", { class: "bad" }, "The FP32 model or its engine is wrong already, and no plan repairs that: see the errors below."));
  if (data.unmet && chosen) box.append(h("p", { class: "bad" }, "Limits not met: ", prose(data.unmet), "."));
  if (chosen === null) box.append(h("p", { class: "bad" }, `No plan is chosen: ${data.chosen_reason}.`));
  else {
    const gain = chosen === fp32 ? "the FP32 model itself" : `${chosen.speedup_text} as fast as all-FP32`;
    const lead = [h("strong", {}, `${chosen.ms_text} ms, error ${errorText(chosen)}`), `: ${gain}, ${chosen.halves} of ${groups.length} groups in FP16${hasBf16 ? " or BF16" : ""}. Chosen as ${data.chosen_reason}.`];
    box.append(h("p", { class: "lead" }, lead));
  }
  const rows = data.recommended.map(recommendedRow);
  const head = h("tr", {}, ["plan", "latency, ms", "speedup", "error", `groups in FP16${hasBf16 ? " or BF16" : ""}`, "against the chosen plan"].map((name, k) => h("th", { scope: "col", class: (k > 0 && k < 5 ? "number" : "") + ([2, 4, 5].includes(k) ? " wide" : "") }, name)));
  box.append(scrolling("Recommended points", h("table", { class: "recommended" }, h("thead", {}, head), h("tbody", {}, rows.map((row) => row.node)))));
  box.append(h("p", { class: "note" }, errorNote()));
  onChange(() => rows.forEach((row) => row.node.classList.toggle("is-selected", row.plan === state.plan)));
  onChange(() => rows.forEach((row) => row.button.setAttribute("aria-pressed", String(row.plan === state.plan))));
  return box;
}

function recommendedRow({ plan: index, roles }) {
  const plan = plans[index];
  const button = h("button", { type: "button", class: "pickable", onclick: () => select(plan) }, roles.join(", "));
  const node = h(
    "tr",
    { class: plan === chosen ? "is-chosen" : "" },
    h("th", { scope: "row" }, plan === chosen ? h("span", { class: "tag" }, "ship") : null, button, h("code", { class: "wide" }, plan.plan), h("div", { class: "narrow" }, plan.against)),
    h("td", { class: "number" }, plan.ms_text),
    h("td", { class: "number wide" }, plan.speedup_text),
    h("td", { class: "number" }, errorCell(plan)),
    h("td", { class: "number wide" }, `${plan.halves}/${groups.length}`),
    h("td", { class: "wide" }, plan.against),
  );
  return { plan, node, button };
}

/** The error that counts, with a mark where only the search samples know it. */
function errorCell(plan) {
  if (!plan.finite) return h("span", { class: "bad" }, "not finite");
  return [formatError(plan.error), plan.search_larger ? h("small", { title: "larger on the search samples" }, ` !(${formatError(plan.search)})`) : null, plan.held_out === null && someHeldOut ? h("sup", { title: "on the search samples" }, "s") : null];
}

const someHeldOut = plans.some((plan) => plan.held_out !== null);

function errorNote() {
  const marked = data.recommended.some((one) => plans[one.plan].held_out === null) ? "those marked s are on the search samples" : "";
  const larger = data.recommended.some((one) => plans[one.plan].search_larger) ? "those marked ! are larger on the search samples, in brackets" : "";
  const parts = plans.some((plan) => /\[/.test(plan.part)) ? "the part that decides is named in the table of all points" : "";
  return someHeldOut
    ? `Errors are ${data.metric} on held-out samples, which the search never used (${data.error_is})${[parts, marked, larger].filter(Boolean).map((text) => "; " + text).join("")}.`
    : `Errors are ${data.metric} on the search samples (${data.error_is})${parts && "; " + parts}; no plan has met the held-out samples.`;
}

