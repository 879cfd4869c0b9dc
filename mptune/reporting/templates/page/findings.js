// What breaks in FP16, and why. Then what else may mislead.

const SHOWN_FINDINGS = 6;

function findingsSection() {
  const errors = data.findings.filter((f) => f.severity === "error");
  const numbers = data.findings.filter((f) => f.severity !== "error" && f.is_fp16);
  const box = section("breaks", data.breaks);
  if (errors.length) box.append(...[findingList(errors)].flat());
  box.append(plainFp16(numbers.length));
  if (numbers.length) box.append(...[findingList(numbers)].flat());
  return box;
}

/** What an engine in plain FP16 gives, as far as it was run. */
function plainFp16(found) {
  const line = h("p", { class: "lead" });
  const all = fp16 ?? chosen ?? fp32;
  const pinned = groups.filter((group, column) => group.pinned !== null && precisionOf(all, column) === "fp32").length;
  if (fp16 === null) line.append(`${data.fp16_name} has no result: it failed, or was not evaluated. `);
  else if (!fp16.finite) line.append(h("strong", {}, `${data.fp16_name} gives NaN or Inf`), " where the FP32 model gives numbers. ");
  else {
    line.append(h("strong", {}, `${data.fp16_name}: error ${errorText(fp16)}`), ` at ${fp16.ms_text} ms`);
    line.append(chosen && chosen !== fp16 ? `; the chosen plan: ${errorText(chosen)} at ${chosen.ms_text} ms. ` : ". ");
  }
  if (pinned) line.append(`${plural(pinned, "group")} ${pinned === 1 ? "is" : "are"} pinned to FP32, so an engine with all groups in FP16 was not run. `);
  if (!found) line.append("No value, constant, mask or sum was found that FP16 cannot hold.");
  return line;
}

function findingList(found) {
  const list = h("ul", { class: "findings" }, found.slice(0, SHOWN_FINDINGS).map(findingItem));
  if (found.length <= SHOWN_FINDINGS) return list;
  const rest = () => h("ul", { class: "findings" }, found.slice(SHOWN_FINDINGS).map(findingItem));
  return [list, folded("more-findings-" + found[0].severity, `${found.length - SHOWN_FINDINGS} more`, rest)];
}

function findingItem(finding) {
  const where = finding.where;
  const facts = [];
  const place = (word, names, most = 3) => {
    if (!names.length) return;
    const shown = names.slice(0, most).map((name, k) => [k ? ", " : "", named(name, 70)]);
    facts.push([names.length > 1 ? word + "s" : word, [shown, names.length > most ? ` and ${names.length - most} more` : ""]]);
  };
  place("node", where.nodes);
  place("value", where.tensors);
  place("output", where.outputs.map((o) => o.name + (o.columns ? `[${o.columns.join(",")}]` : "")));
  place("input", where.inputs);
  if (where.samples.length) facts.push([where.samples.length > 1 ? "samples" : "sample", where.samples.slice(0, 8).join(", ")]);
  if (where.groups.length) facts.push([where.groups.length > 1 ? "groups" : "group", groupStates(where.groups)]);
  const evidence = Object.entries(finding.evidence).filter(([, value]) => typeof value === "number" || ["inf", "-inf", "nan"].includes(value));
  if (evidence.length) facts.push(["evidence", evidence.map(([name, value]) => `${name.replaceAll("_", " ")} ${formatNumber(value)}`).join(", ")]);
  return h(
    "li",
    {},
    h("p", { class: "finding-head" }, h("code", { class: `code ${finding.severity}` }, finding.code), " ", h("span", { class: "severity" }, finding.severity)),
    h("p", { class: "finding-text" }, prose(finding.text), "."),
    facts.length ? h("dl", { class: "places" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : null,
    finding.cure ? h("p", { class: "cure" }, h("span", {}, "Do: "), prose(finding.cure), ".") : null,
  );
}

/** The groups of a finding with what the chosen plan does to them. */
function groupStates(ids) {
  const at = new Map(groups.map((group, column) => [group.id, column]));
  return ids.slice(0, 6).map((id, k) => {
    const column = at.get(id);
    const now = column === undefined || chosen === null ? "" : ` ${precisionOf(chosen, column).toUpperCase()} in the chosen plan`;
    return [k ? ", " : "", h("code", {}, id), now];
  });
}

/** Findings about data, target and run, and warnings without a code. */
function warningsSection() {
  const other = data.findings.filter((f) => f.severity !== "error" && !f.is_fp16);
  const loud = other.filter((f) => f.severity === "warning");
  const quiet = other.filter((f) => f.severity !== "warning");
  if (!other.length && !data.warnings.length) return null;
  const box = section("warnings", "Before you rely on the figures");
  if (loud.length) box.append(...[findingList(loud)].flat());
  if (data.warnings.length) box.append(h("ul", { class: "plain" }, data.warnings.map((text) => h("li", {}, prose(text), "."))));
  if (quiet.length) box.append(h("ul", { class: "plain quiet" }, quiet.map((f) => h("li", {}, prose(f.cure ? `${f.text}; ${f.cure}` : f.text), "."))));
  return box;
}

