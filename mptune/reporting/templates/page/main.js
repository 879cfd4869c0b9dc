// The page, from top to bottom.

function headline() {
  const pill = (what, source) => h("span", { class: `pill ${source === "measured" ? "measured" : "predicted"}` }, `${what} ${source}`);
  return h("header", {}, h("h1", {}, data.model.name), h("p", { class: "subtitle" }, h("span", {}, data.target), h("span", {}, data.engine), pill("latency", data.latency_is), pill("error", data.error_is)));
}

function explore() {
  const box = section("front", "Latency against error");
  const chart = chartSection();
  box.append(
    h("p", {}, "Lower left is better. Click or tap a point, use the arrow keys, or set limits: type them, or drag the two handles on the axes."),
    h("div", { class: "explore" }, chart.node, selectionPanel()),
    pointsBlock(),
  );
  return box;
}

const page = document.getElementById("page");
const parts = [headline(), decideSection(), findingsSection(), confirmationSection(), warningsSection(), explore(), groups.length ? stripSection().node : null, outputsSection(), progressSection()];
parts.push(h("footer", {}, `Written by mptune ${data.version}. This page needs no network and sends nothing.`));
page.replaceChildren(...parts.filter(Boolean));
change({});

// Paper shows what is folded.
window.addEventListener("beforeprint", () => {
  for (const id of ["points", "groups"]) {
    const box = document.getElementById(id);
    if (box) box.open = true;
  }
});
