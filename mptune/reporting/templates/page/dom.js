// Elements. Text only ever becomes text nodes and attributes: nothing from the data is read as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== "") node.append(child);
  }
  return node;
}

/** An HTML element. Attributes that begin with "on" are listeners; null leaves one out. */
function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A section of the page with its heading. */
function section(id, heading, ...children) {
  return h("section", { id, "aria-labelledby": id + "-title" }, h("h2", { id: id + "-title" }, heading), ...children);
}

/** What a mark of a drawing means; the icon has 12 x 12 pixels. */
function legendItem(icon, text) {
  return h("span", {}, s("svg", { class: "icon", width: 12, height: 12, "aria-hidden": "true" }, icon), text);
}

/** A table that scrolls sideways where it does not fit; keyboards reach it. */
function scrolling(label, table) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);
}

/** A block that is built when it is first opened: a long table costs nothing before. */
function folded(id, summary, build) {
  const box = h("details", { id }, h("summary", {}, summary));
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(build());
  });
  return box;
}

/** Draw now and whenever the width of the frame changes; `draw` is given the width in pixels. */
function drawn(frame, draw) {
  let last = 0;
  const redraw = () => {
    const width = Math.floor(frame.clientWidth);
    if (width && width !== last) {
      last = width;
      draw(width);
    }
  };
  new ResizeObserver(redraw).observe(frame);
  return () => {
    last = 0;
    redraw();
  };
}

/** A slider for the keyboard: arrows, Home and End walk through the places 0 to count - 1. */
function walker(frame, label, count, place, go) {
  fill(frame, { role: "slider", tabindex: "0", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": Math.max(0, count() - 1), "aria-valuenow": 0 }, []);
  frame.addEventListener("keydown", (event) => {
    const last = count() - 1;
    const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    go(Math.min(last, Math.max(0, place() + steps[event.key])));
  });
}

function say(frame, place, text) {
  frame.setAttribute("aria-valuenow", Math.max(0, place));
  frame.setAttribute("aria-valuetext", text);
}

