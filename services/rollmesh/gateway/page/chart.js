// One chart: lines with a band (or whiskers) from low to high, or areas on top of each other; a readout, and the same
// numbers as a table.
import { axisName, axisTicks, positionText } from "./axis.js";
import { el, reconcile, setAttribute, setHidden, setText, svg } from "./dom.js";
import { count } from "./format.js";
import { partsOf } from "./pauses.js";
import { decades, ticks, valueRange } from "./ticks.js";

const MARGIN = { left: 46, right: 8, top: 8, bottom: 20 };
const COLOURS = 4;
const LEAST_DRAG = 8; // pixels

// Curves of a run beside have the colours after those of the run; once the colours repeat, their lines are dotted.
// An area has a colour of its own (paint), a value (mean), and its edges (low and high).
const styleOf = ({ colour, paint }) => (paint ? "filled" : `c${colour % COLOURS}${colour >= COLOURS ? " beside" : ""}`);

// Points of an evaluation are measurements with an error, on any axis.
const isMeasured = (one) => one.measured === true || one.axis === "policy_version";

// Index of the value in an ascending list that is nearest to `wanted`; -1 outside of its range.
function nearestAt(list, wanted) {
  if (list.length === 0 || wanted < list[0] || wanted > list[list.length - 1]) return -1;
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= wanted) low = middle;
    else high = middle;
  }
  return wanted - list[low] <= list[high] - wanted ? low : high;
}

// options: {title, waitsFor, format(value, step of the axis), select, log, unnamed, zoom({axis, from, to} | null)}; select is
// a node shown instead of the title, log asks for a logarithmic axis of values, and unnamed for no key of the curves.
// Dragging over the chart zooms into a range of its axis; a double click or Escape leaves it.
export class Chart {
  #options;
  #series = [];
  #xs = []; // positions of all points, ascending
  #format;
  #svg = svg("svg", { role: "img", tabindex: 0 });
  #grid = svg("g");
  #curves = svg("g");
  #cursor = svg("line", { class: "cursor", visibility: "hidden" });
  #drag = svg("rect", { class: "drag", visibility: "hidden", y: MARGIN.top });
  #from = null; // pixel where a drag began
  #newest = "now";
  #bound = null; // value of a line across the chart
  #latest = el("span");
  #empty = el("p", { class: "empty" });
  #readout = el("p", { class: "readout", "aria-live": "polite" });
  #body = el("tbody");
  #head = el("tr");
  #details;
  #at = -1; // index of the position under the cursor
  #shape = null; // scales of the newest drawing
  node;

  constructor(options) {
    this.#options = options;
    this.#format = options.format;
    this.#svg.append(this.#grid, this.#curves, this.#cursor, this.#drag);
    const table = el("table", null, el("thead", null, this.#head), this.#body);
    const scroll = el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": `${options.title}: table` },
      table,
    );
    this.#details = el("details", { ontoggle: () => this.#fillTable() }, el("summary", null, "Numbers"), scroll);
    const caption = el("figcaption", null, options.select ?? options.title, this.#latest);
    this.node = el("figure", { class: "chart" }, caption, this.#svg, this.#empty, this.#readout, this.#details);
    this.#listen();
  }

  // series: as returned by `viewed`, with an id, a label and the number of its colour; the first one with points defines
  // the axis. newest: name of the right end of a time axis. bound: value of a dashed line across the chart.
  show(series, format = this.#format, newest = "now", bound = null) {
    const axis = series.find((one) => one.x.length > 0)?.axis;
    this.#series = series.filter((one) => one.x.length > 0 && one.axis === axis);
    this.#xs = [...new Set(this.#series.flatMap((one) => one.x))].sort((a, b) => a - b);
    this.#newest = newest;
    this.#bound = bound;
    this.#format = format;
    this.#draw();
    if (this.#details.open) this.#fillTable();
  }

  #draw() {
    const drawn = this.#series.length > 0;
    setHidden(this.#empty, drawn);
    setHidden(this.#details, !drawn);
    setText(this.#empty, drawn ? "" : `Nothing yet: waiting for ${this.#options.waitsFor}.`);
    this.#svg.style.display = drawn ? "" : "none";
    this.#showLatest();
    if (!drawn) return;
    setAttribute(this.#svg, "aria-label", this.#summary());
    const [width, height] = [this.#svg.clientWidth, this.#svg.clientHeight];
    if (width === 0) return;
    setAttribute(this.#svg, "viewBox", `0 0 ${width} ${height}`);
    this.#shape = this.#scales(width, height);
    this.#drawGrid(width, height);
    reconcile(
      this.#curves,
      this.#series,
      (one) => one.id,
      () => svg("g"),
      (node, one) => this.#drawSeries(node, one),
    );
    this.#drawCursor();
  }

  #scales(width, height) {
    let [from, to] = [this.#xs[0], this.#xs[this.#xs.length - 1]];
    if (from === to) [from, to] = [from - 1, to + 1];
    const bounds = this.#bound === null ? [] : [this.#bound];
    const ends = ["low", "high"].map((name) => [...this.#series.flatMap((one) => one[name]), ...bounds]);
    const { low, high } = this.#options.log ? decades(ends[0]) : valueRange(...ends);
    const scaled = this.#options.log ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
    const share = (value) => (scaled(value) - scaled(low)) / (scaled(high) - scaled(low));
    const x = (value) => MARGIN.left + ((value - from) / (to - from)) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => height - MARGIN.bottom - share(value) * (height - MARGIN.top - MARGIN.bottom);
    return { x, y, from, to, low, high, width, height };
  }

  #drawGrid(width, height) {
    const { x, y, from, to, low, high } = this.#shape;
    const axis = this.#series[0].axis;
    const { log } = this.#options;
    const levels = log ? [low, high] : ticks(low, high, 4);
    const step = log ? low : levels.length > 1 ? levels[1] - levels[0] : high - low;
    const lines = levels.map((value) => ({ key: `y${value}`, value, vertical: true, style: "grid" }));
    if (this.#bound !== null) lines.push({ key: "bound", value: this.#bound, vertical: true, style: "bound", words: "" });
    const columns = axisTicks(axis, from, to, width, this.#newest).map(({ value, text }) => ({
      key: `x${value}`,
      value,
      words: text,
      vertical: false,
    }));
    const make = ({ vertical, style }) => svg("g", null, vertical ? svg("line", { class: style }) : null, svg("text"));
    const update = (node, { value, vertical, words }) => {
      const text = node.lastChild;
      if (vertical) {
        const at = Math.round(y(value)) + 0.5;
        for (const [name, v] of [
          ["x1", MARGIN.left],
          ["x2", width - MARGIN.right],
          ["y1", at],
          ["y2", at],
        ]) {
          setAttribute(node.firstChild, name, v);
        }
        setText(text, words ?? this.#format(value, step));
      } else setText(text, words);
      setAttribute(text, "text-anchor", vertical ? "end" : "middle");
      setAttribute(text, "x", vertical ? MARGIN.left - 6 : Math.min(Math.max(x(value), MARGIN.left), width - 16));
      setAttribute(text, "y", vertical ? y(value) + 4 : height - 5);
    };
    reconcile(this.#grid, [...lines, ...columns], (item) => item.key, make, update);
  }

  #drawSeries(node, one) {
    const { x, y } = this.#shape;
    const points = one.x.map((value, i) => [
      x(value).toFixed(1),
      y(one.mean[i]).toFixed(1),
      y(one.low[i]).toFixed(1),
      y(one.high[i]).toFixed(1),
    ]);
    const measured = isMeasured(one);
    if (node.childElementCount === 0) {
      setAttribute(node, "class", styleOf(one));
      node.append(
        svg("path", { class: "range" }),
        svg("path", { class: "whisker" }),
        svg("path", { class: `mean ${styleOf(one)}` }),
        svg("path", { class: "dot" }),
      );
    }
    const [range, whisker, mean, dot] = node.children;
    if (one.paint) range.style.fill = one.paint;
    const line = (part, at) => part.map((p) => `${p[0]},${p[at]}`).join("L");
    const parts = partsOf(one.axis, one.x, points);
    const bands = parts.map((part) => `M${line(part, 2)}L${line([...part].reverse(), 3)}Z`);
    setAttribute(range, "d", measured ? "" : bands.join(""));
    setAttribute(whisker, "d", measured ? points.map((p) => `M${p[0]},${p[2]}V${p[3]}`).join("") : "");
    setAttribute(mean, "d", one.paint ? "" : parts.map((part) => `M${line(part, 1)}`).join(""));
    // Measurements are few, so each gets a dot; other curves have a dot only at the newest point.
    const dots = measured ? points : one.paint ? [] : points.slice(-1);
    setAttribute(dot, "d", dots.map((p) => `M${p[0] - 3},${p[1]}a3,3 0 1,0 6,0a3,3 0 1,0 -6,0`).join(""));
  }

  #listen() {
    new ResizeObserver(() => this.#draw()).observe(this.#svg);
    const pixel = (event) => event.clientX - this.#svg.getBoundingClientRect().left;
    this.#svg.addEventListener("pointermove", (event) => {
      if (!this.#shape) return;
      this.#point(this.#nearest(pixel(event)));
      if (this.#from !== null) this.#drawDrag(pixel(event));
    });
    // A finger that moves up or down scrolls the page, which cancels the pointer (touch-action in parts.css); a second
    // finger zooms the page.
    this.#svg.addEventListener("pointerdown", (event) => {
      if (this.#shape && event.button === 0) this.#from = event.isPrimary ? pixel(event) : null;
    });
    this.#svg.addEventListener("pointerup", (event) => this.#endDrag(event.isPrimary ? pixel(event) : null));
    this.#svg.addEventListener("pointercancel", () => this.#endDrag(null));
    this.#svg.addEventListener("dblclick", () => this.#options.zoom(null));
    const leave = () => {
      this.#point(-1);
      this.#endDrag(null);
    };
    this.#svg.addEventListener("pointerleave", leave);
    this.#svg.addEventListener("blur", leave);
    this.#svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#options.zoom(null);
      const last = this.#xs.length - 1;
      const from = this.#at < 0 ? last + (event.key === "ArrowLeft" ? 1 : 0) : this.#at;
      const next = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      this.#point(Math.min(Math.max(next, 0), last));
    });
  }

  #drawDrag(pixel) {
    const [left, right] = [Math.min(this.#from, pixel), Math.max(this.#from, pixel)];
    setAttribute(this.#drag, "visibility", "visible");
    setAttribute(this.#drag, "x", left);
    setAttribute(this.#drag, "width", right - left);
    setAttribute(this.#drag, "height", Math.max(0, this.#shape.height - MARGIN.top - MARGIN.bottom));
  }

  // pixel: where the drag ends; null cancels it.
  #endDrag(pixel) {
    const from = this.#from;
    this.#from = null;
    setAttribute(this.#drag, "visibility", "hidden");
    if (from === null || pixel === null || Math.abs(pixel - from) < LEAST_DRAG) return;
    const [low, high] = [from, pixel].sort((a, b) => a - b).map((at) => this.#valueAt(at));
    this.#options.zoom({ axis: this.#series[0].axis, from: low, to: high });
  }

  #valueAt(pixel) {
    const { from, to, width } = this.#shape;
    const share = (pixel - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    return from + Math.min(1, Math.max(0, share)) * (to - from);
  }

  #nearest(pixel) {
    if (this.#xs.length === 0) return -1;
    return nearestAt(this.#xs, Math.min(Math.max(this.#valueAt(pixel), this.#xs[0]), this.#xs.at(-1)));
  }

  #point(at) {
    this.#at = at;
    this.#drawCursor();
    setText(this.#readout, at < 0 ? "" : this.#row(at).filter(Boolean).join(", "));
  }

  #drawCursor() {
    const value = this.#xs[this.#at];
    setAttribute(this.#cursor, "visibility", value === undefined ? "hidden" : "visible");
    if (value === undefined || !this.#shape) return;
    for (const [name, v] of [
      ["x1", this.#shape.x(value)],
      ["x2", this.#shape.x(value)],
      ["y1", MARGIN.top],
      ["y2", this.#shape.height - MARGIN.bottom],
    ]) {
      setAttribute(this.#cursor, name, v);
    }
  }

  // Text of one position, then the mean and range of every series there; empty where it has no point.
  #row(at) {
    const value = this.#xs[at];
    const spread = (one) => {
      const i = nearestAt(one.x, value);
      if (i < 0 || (one.paint && one.mean[i] === 0)) return "";
      const range = !one.paint && one.high[i] > one.low[i] ? ` (${this.#format(one.low[i])} to ${this.#format(one.high[i])})` : "";
      return `${this.#series.length > 1 ? `${one.label} ` : ""}${this.#format(one.mean[i])}${range}`;
    };
    return [positionText(this.#series[0].axis, value), ...this.#series.map(spread)];
  }

  // Newest values; of several curves each with its key.
  #showLatest() {
    if (this.#options.unnamed) return;
    if (this.#series.length < 2) {
      setText(this.#latest, this.#series.length > 0 ? this.#latestText() : "");
      return;
    }
    const text = (one) => (one.paint ? one.label : `${one.label} ${this.#format(one.mean[one.mean.length - 1])}`);
    const make = (one) => {
      const key = el("span", { class: `key ${styleOf(one)}` });
      if (one.paint) key.style.setProperty("--paint", one.paint);
      return key;
    };
    if (this.#latest.firstElementChild === null) setText(this.#latest, "");
    reconcile(this.#latest, this.#series, (one) => one.id, make, (node, one) => setText(node, text(one)));
  }

  #latestText() {
    const newest = (one) => {
      const last = one.x.length - 1;
      const error = isMeasured(one) && one.high[last] > one.mean[last] ? ` \u00b1 ${this.#format(one.high[last] - one.mean[last])}` : "";
      return `${this.#series.length > 1 ? `${one.label} ` : ""}${this.#format(one.mean[last])}${error}`;
    };
    return this.#series.map(newest).join(", ");
  }

  #summary() {
    const { axis } = this.#series[0];
    const ends = `from ${positionText(axis, this.#xs[0])} to ${positionText(axis, this.#xs.at(-1))}`;
    return `${this.#options.title} by ${axisName(axis)}, ${count(this.#xs.length)} points ${ends}; newest ${this.#latestText()}. Use the arrow keys to read the points.`;
  }

  #fillTable() {
    if (!this.#details.open || this.#series.length === 0) return;
    const { axis } = this.#series[0];
    const heads = [{ id: "axis", label: axisName(axis) }, ...this.#series];
    reconcile(
      this.#head,
      heads,
      (one) => one.id,
      () => el("th", { scope: "col" }),
      (node, one) => setText(node, one.label),
    );
    const rows = this.#xs.map((value, at) => ({ key: value, cells: this.#row(at) })).reverse();
    const update = (row, { cells }) => {
      while (row.childElementCount < cells.length) row.append(el("td"));
      while (row.childElementCount > cells.length) row.lastChild.remove();
      cells.forEach((text, at) => setText(row.children[at], text));
    };
    reconcile(
      this.#body,
      rows,
      (row) => row.key,
      () => el("tr"),
      update,
    );
  }
}
