// One line chart: mean with a band (or whiskers) from low to high, a readout, and the same numbers as a table.
import { el, reconcile, setAttribute, setHidden, setText, svg } from "./dom.js";
import { clock, count } from "./format.js";
import { ticks, valueRange } from "./ticks.js";

const MARGIN = { left: 46, right: 8, top: 8, bottom: 20 };
const AXES = { train_step: "train step", policy_version: "policy version", time: "time" };

const COLOURS = 4;
const LEAST_DRAG = 8; // pixels

// Points of an evaluation are measurements with an error, on any axis.
const isMeasured = (one) => one.measured === true || one.axis === "policy_version";

// options: {title, waitsFor, format(value, step of the axis), select, zoom({axis, from, to} | null)}; select is a node shown
// instead of the title. Dragging over the chart zooms into a range of its axis; a double click or Escape leaves it.
export class Chart {
  #options;
  #series = [];
  #format;
  #svg = svg("svg", { role: "img", tabindex: 0 });
  #grid = svg("g");
  #curves = svg("g");
  #cursor = svg("line", { class: "cursor", visibility: "hidden" });
  #drag = svg("rect", { class: "drag", visibility: "hidden", y: MARGIN.top });
  #from = null; // pixel where a drag began
  #newest = "now";
  #latest = el("span");
  #empty = el("p", { class: "empty" });
  #readout = el("p", { class: "readout", "aria-live": "polite" });
  #body = el("tbody");
  #head = el("tr");
  #details;
  #at = -1; // index of the point under the cursor
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

  // series: as returned by `viewed`; the first one defines the axis. newest: name of the right end of a time axis.
  show(series, format = this.#format, newest = "now") {
    const axis = series.find((one) => one.x.length > 0)?.axis;
    this.#series = series.filter((one) => one.x.length > 0 && one.axis === axis);
    this.#newest = newest;
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
      this.#series.map((one, at) => ({ one, at })),
      ({ one }) => one.name,
      () => svg("g"),
      (node, item) => this.#drawSeries(node, item.one, item.at),
    );
    this.#drawCursor();
  }

  #scales(width, height) {
    const xs = this.#series.flatMap((one) => [one.x[0], one.x[one.x.length - 1]]);
    let [from, to] = [Math.min(...xs), Math.max(...xs)];
    if (from === to) [from, to] = [from - 1, to + 1];
    const { low, high } = valueRange(
      this.#series.flatMap((one) => one.low),
      this.#series.flatMap((one) => one.high),
    );
    const x = (value) => MARGIN.left + ((value - from) / (to - from)) * (width - MARGIN.left - MARGIN.right);
    const y = (value) =>
      height - MARGIN.bottom - ((value - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
    return { x, y, from, to, low, high, width, height };
  }

  #drawGrid(width, height) {
    const { x, y, from, to, low, high } = this.#shape;
    const axis = this.#series[0].axis;
    const levels = ticks(low, high, 4);
    const step = levels.length > 1 ? levels[1] - levels[0] : high - low;
    const lines = levels.map((value) => ({ key: `y${value}`, value, vertical: true }));
    const wanted = Math.max(2, Math.floor(width / (axis === "time" ? 90 : 60)));
    const marks = axis === "time" ? this.#timeTicks(from, to, wanted) : ticks(from, to, wanted, { integer: true });
    const columns = marks.map((value) => ({ key: `x${value}`, value, vertical: false }));
    const make = ({ vertical }) => svg("g", null, vertical ? svg("line", { class: "grid" }) : null, svg("text"));
    const update = (node, { value, vertical }) => {
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
        setText(text, this.#format(value, step));
      } else setText(text, axis === "time" ? this.#ago(value) : count(value));
      setAttribute(text, "text-anchor", vertical ? "end" : "middle");
      setAttribute(text, "x", vertical ? MARGIN.left - 6 : Math.min(Math.max(x(value), MARGIN.left), width - 16));
      setAttribute(text, "y", vertical ? y(value) + 4 : height - 5);
    };
    reconcile(this.#grid, [...lines, ...columns], (item) => item.key, make, update);
  }

  // Ticks count back from the newest point, so that they keep their place while the curve moves.
  #timeTicks(from, to, wanted) {
    const found = ticks(0, to - from, wanted).map((ago) => to - ago);
    return found.length > 1 ? found : [to];
  }

  #ago(value) {
    const past = Math.round(this.#shape.to - value);
    if (past < 1) return this.#newest;
    return past < 120
      ? `\u2212${past} s`
      : past < 7200
        ? `\u2212${Math.round(past / 60)} min`
        : `\u2212${(past / 3600).toFixed(1)} h`;
  }

  #drawSeries(node, one, at) {
    const { x, y } = this.#shape;
    const points = one.x.map((value, i) => [
      x(value).toFixed(1),
      y(one.mean[i]).toFixed(1),
      y(one.low[i]).toFixed(1),
      y(one.high[i]).toFixed(1),
    ]);
    const measured = isMeasured(one);
    if (node.childElementCount === 0) {
      setAttribute(node, "class", `c${at % COLOURS}`);
      node.append(
        svg("path", { class: "range" }),
        svg("path", { class: "whisker" }),
        svg("path", { class: `mean c${at % COLOURS}` }),
        svg("path", { class: "dot" }),
      );
    }
    const [range, whisker, mean, dot] = node.children;
    const band = measured
      ? ""
      : `M${points.map((p) => `${p[0]},${p[2]}`).join("L")}L${[...points]
          .reverse()
          .map((p) => `${p[0]},${p[3]}`)
          .join("L")}Z`;
    setAttribute(range, "d", band);
    setAttribute(whisker, "d", measured ? points.map((p) => `M${p[0]},${p[2]}V${p[3]}`).join("") : "");
    setAttribute(mean, "d", `M${points.map((p) => `${p[0]},${p[1]}`).join("L")}`);
    // Measurements are few, so each gets a dot; other curves have a dot only at the newest point.
    const dots = measured ? points : points.slice(-1);
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
    // A finger scrolls the page; only a mouse and a pen zoom by dragging.
    this.#svg.addEventListener("pointerdown", (event) => {
      if (this.#shape && event.button === 0 && event.pointerType !== "touch") this.#from = pixel(event);
    });
    this.#svg.addEventListener("pointerup", (event) => this.#endDrag(pixel(event)));
    this.#svg.addEventListener("dblclick", () => this.#options.zoom(null));
    const leave = () => {
      this.#point(-1);
      this.#endDrag(null);
    };
    this.#svg.addEventListener("pointerleave", leave);
    this.#svg.addEventListener("blur", leave);
    this.#svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#options.zoom(null);
      const last = (this.#series[0]?.x.length ?? 0) - 1;
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
    let best = -1;
    const xs = this.#series[0]?.x ?? [];
    for (let at = 0; at < xs.length; at += 1) {
      if (best < 0 || Math.abs(this.#shape.x(xs[at]) - pixel) < Math.abs(this.#shape.x(xs[best]) - pixel)) best = at;
    }
    return best;
  }

  #point(at) {
    this.#at = at;
    this.#drawCursor();
    setText(this.#readout, at < 0 ? "" : this.#row(at).join(", "));
  }

  #drawCursor() {
    const value = this.#series[0]?.x[this.#at];
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

  #place(value) {
    const { axis } = this.#series[0];
    return axis === "time" ? clock(value) : axis === "policy_version" ? `v${count(value)}` : `step ${count(value)}`;
  }

  // Text of one point: its position, then the mean and range of every series.
  #row(at) {
    const [first] = this.#series;
    const spread = (one) => {
      const i = one === first ? at : one.x.findIndex((value) => value >= first.x[at]);
      if (i < 0 || one.mean[i] === undefined) return "";
      const range = one.high[i] > one.low[i] ? ` (${this.#format(one.low[i])} to ${this.#format(one.high[i])})` : "";
      return `${this.#series.length > 1 ? `${one.label} ` : ""}${this.#format(one.mean[i])}${range}`;
    };
    return [this.#place(first.x[at]), ...this.#series.map(spread).filter(Boolean)];
  }

  // Newest values; of several curves each with its key.
  #showLatest() {
    if (this.#series.length < 2) {
      setText(this.#latest, this.#series.length > 0 ? this.#latestText() : "");
      return;
    }
    const text = (one) => `${one.label} ${this.#format(one.mean[one.mean.length - 1])}`;
    const items = this.#series.map((one, at) => ({ one, at }));
    const make = ({ at }) => el("span", { class: `key c${at % COLOURS}` });
    if (this.#latest.firstElementChild === null) setText(this.#latest, "");
    reconcile(this.#latest, items, ({ one }) => one.name, make, (node, { one }) => setText(node, text(one)));
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
    const [first] = this.#series;
    const ends = `from ${this.#place(first.x[0])} to ${this.#place(first.x[first.x.length - 1])}`;
    return `${this.#options.title} by ${AXES[first.axis]}, ${count(first.x.length)} points ${ends}; newest ${this.#latestText()}. Use the arrow keys to read the points.`;
  }

  #fillTable() {
    if (!this.#details.open || this.#series.length === 0) return;
    const [first] = this.#series;
    const heads = [AXES[first.axis], ...this.#series.map((one) => one.label)];
    reconcile(
      this.#head,
      heads,
      (head) => head,
      () => el("th", { scope: "col" }),
      setText,
    );
    const rows = first.x.map((value, at) => ({ key: value, cells: this.#row(at) })).reverse();
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
