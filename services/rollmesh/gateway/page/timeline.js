// The timeline of rollouts: zoom, scroll, selection by pointer or keyboard, and its description.
import { byId, el, reconcile, setAttribute, setHidden, setText } from "./dom.js";
import { count, plural, seconds, short, version, words } from "./format.js";
import { Lanes } from "./lanes.js";
import { colourSign, currentColours, onColours, setSight, shade, versionTag } from "./palette.js";
import { AXIS_HEIGHT, drawTimeline, timeRange } from "./timeline_draw.js";

const ROW_HEIGHTS = [1, 2, 4, 8, 14, 22];
const TALLEST_FITTED_ROW = 14;
const LEGEND_VERSIONS = 12;
const TABLE_ROWS = 200;

export class Timeline {
  #lanes = new Lanes();
  #canvas = el("canvas", { role: "img", tabindex: 0, "aria-describedby": "timeline-readout" });
  #space = el("div", { class: "space" });
  #empty = el("p", { class: "empty" });
  #box = byId("timeline");
  #time = 0;
  #window = 60;
  #inFlight = 0;
  #leftOut = 0;
  #zoom = -1; // index of ROW_HEIGHTS; -1 fits everything
  #selected = null; // trajectory id
  #open;
  #pending = false;

  constructor(openTrajectory) {
    this.#open = openTrajectory;
    this.#box.append(this.#space, this.#canvas, this.#empty);
    this.#listen();
  }

  apply(name, timeline) {
    this.#time = timeline.time;
    this.#inFlight = timeline.in_flight;
    this.#leftOut = timeline.left_out;
    if (name === "snapshot") {
      this.#window = timeline.window_seconds;
      this.#lanes.reset(timeline.rollouts);
    } else this.#lanes.apply(timeline.changed, timeline.removed);
  }

  // Updates everything from the newest event; `waitingFor` explains an empty timeline.
  render(waitingFor) {
    this.#drawSoon();
    setHidden(this.#empty, this.#lanes.size > 0);
    setText(this.#empty, `No rollouts yet${waitingFor ? `: waiting for ${waitingFor}` : ""}`);
    const versions = this.#versionCounts();
    this.#renderLegend(versions);
    const parts = versions.map(([policyVersion, n]) => `${count(n)} on ${version(policyVersion)}`);
    const more = this.#leftOut > 0 ? `; ${count(this.#leftOut)} more are not drawn` : "";
    const text = `Timeline: ${plural(this.#inFlight, "rollout")} in flight${parts.length > 0 ? ", newest tokens: " : ""}`;
    setAttribute(this.#canvas, "aria-label", `${text}${parts.slice(0, LEGEND_VERSIONS).join(", ")}${more}`);
    if (!byId("rollout-table").hidden) this.#renderTable();
    // With keyboard focus the text does not change until the selection moves: a screen reader may be reading it.
    if (this.#selected === null) this.#hint();
    else if (document.activeElement !== this.#canvas || !this.#lanes.get(this.#selected)) this.#describe();
  }

  // Rollouts in flight by the version of their newest tokens, newest version first.
  #versionCounts() {
    const counts = new Map();
    for (const span of this.#lanes.values()) {
      if (span.end !== null || span.intervals.length === 0) continue;
      const newest = span.intervals[span.intervals.length - 1].policy_version;
      counts.set(newest, (counts.get(newest) ?? 0) + 1);
    }
    return [...counts].sort((a, b) => b[0] - a[0]);
  }

  // Versions of everything that is drawn, newest first; they set the ramp of the page.
  #drawnVersions() {
    const { from } = this.#range();
    const drawn = new Set();
    for (const span of this.#lanes.values())
      for (const interval of span.intervals) if (interval.end >= from) drawn.add(interval.policy_version);
    const found = [...drawn].sort((a, b) => b - a);
    if (found.length > 0) setSight(found[found.length - 1], found[0]);
    return found;
  }

  // A key of the ramp: every drawn version or, where they are many, some from the newest to the oldest.
  #renderLegend(counts) {
    const flying = new Map(counts);
    const drawn = this.#drawnVersions();
    const every = Math.max(1, (drawn.length - 1) / (LEGEND_VERSIONS - 1));
    const shown = [...new Set(drawn.map((_, at) => drawn[Math.round(at * every)]).filter((one) => one !== undefined))];
    const make = (policyVersion) =>
      el("span", { class: "version" }, el("b", null, version(policyVersion)), el("span"));
    const update = (node, policyVersion) => {
      if (node.dataset.colour !== colourSign(policyVersion)) shade(node, policyVersion);
      node.dataset.colour = colourSign(policyVersion);
      setText(node.lastChild, flying.has(policyVersion) ? `${count(flying.get(policyVersion))} in flight` : "");
    };
    reconcile(byId("timeline-legend"), shown, (one) => one, make, update);
  }

  #rowHeight() {
    if (this.#zoom >= 0) return ROW_HEIGHTS[this.#zoom];
    const space = this.#canvas.clientHeight - AXIS_HEIGHT;
    return Math.min(TALLEST_FITTED_ROW, space / Math.max(1, this.#lanes.rows.length));
  }

  #range() {
    let oldest = Infinity;
    for (const span of this.#lanes.values()) oldest = Math.min(oldest, span.start);
    return timeRange(this.#time, this.#window, oldest);
  }

  #drawSoon() {
    if (this.#pending) return;
    this.#pending = true;
    requestAnimationFrame(() => {
      this.#pending = false;
      this.#draw();
    });
  }

  #draw() {
    const began = performance.now();
    const [width, height, pixelRatio] = [this.#canvas.clientWidth, this.#canvas.clientHeight, devicePixelRatio || 1];
    if (width === 0) return;
    const rowHeight = this.#rowHeight();
    this.#space.style.height = `${this.#zoom < 0 ? 0 : this.#lanes.rows.length * rowHeight + AXIS_HEIGHT}px`;
    const [columns, lines] = [Math.round(width * pixelRatio), Math.round(height * pixelRatio)];
    if (this.#canvas.width !== columns || this.#canvas.height !== lines) {
      this.#canvas.width = columns;
      this.#canvas.height = lines;
    }
    const context = this.#canvas.getContext("2d");
    context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
    const span = this.#selected === null ? null : this.#lanes.get(this.#selected);
    drawTimeline(context, {
      width,
      height,
      pixelRatio,
      rowHeight,
      rows: this.#lanes.rows,
      range: this.#range(),
      top: this.#zoom < 0 ? 0 : this.#box.scrollTop,
      colours: currentColours(),
      selected: span ? { span, lane: this.#lanes.laneOf(span.id) } : null,
    });
    // Duration of the drawing, for measurements and tests.
    this.#canvas.dataset.drawMs = (performance.now() - began).toFixed(2);
  }

  #listen() {
    new ResizeObserver(() => this.#drawSoon()).observe(this.#box);
    onColours(() => this.#drawSoon());
    this.#box.addEventListener("scroll", () => this.#drawSoon(), { passive: true });
    this.#canvas.addEventListener("pointermove", (event) => this.#select(this.#at(event)));
    this.#canvas.addEventListener("pointerleave", () => {
      if (document.activeElement !== this.#canvas) this.#select(null);
    });
    this.#canvas.addEventListener("click", (event) => {
      const span = this.#at(event);
      if (span) this.#open(span.id);
    });
    this.#canvas.addEventListener("keydown", (event) => this.#onKey(event));
    this.#canvas.addEventListener("blur", () => this.#select(null));
    byId("zoom-in").addEventListener("click", () => this.#setZoom(this.#zoom + 1));
    byId("zoom-out").addEventListener("click", () => this.#setZoom(this.#zoom - 1));
    byId("zoom-fit").addEventListener("click", () => this.#setZoom(-1));
    byId("rollouts-as-table").addEventListener("click", (event) => {
      const shown = byId("rollout-table").hidden;
      byId("rollout-table").hidden = !shown;
      event.currentTarget.setAttribute("aria-expanded", String(shown));
      if (shown) this.#renderTable();
    });
  }

  #setZoom(zoom) {
    // The first step in from a fitted view is the smallest row height above the fitted one.
    const fitted = this.#zoom < 0 && zoom >= 0 ? this.#rowHeight() : 0;
    let next = Math.min(Math.max(zoom, -1), ROW_HEIGHTS.length - 1);
    while (next >= 0 && ROW_HEIGHTS[next] <= fitted && next < ROW_HEIGHTS.length - 1) next += 1;
    // A step out that would show everything with room left is the fitted view.
    if (next >= 0 && next < this.#zoom && ROW_HEIGHTS[next] * this.#lanes.rows.length < this.#box.clientHeight)
      next = -1;
    this.#zoom = next;
    if (next < 0) this.#box.scrollTop = 0;
    this.#hint();
    this.#drawSoon();
  }

  #at(event) {
    const box = this.#canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    if (y < 0 || y > box.height - AXIS_HEIGHT) return null;
    const top = this.#zoom < 0 ? 0 : this.#box.scrollTop;
    const row = this.#lanes.rows[Math.floor((y + top) / this.#rowHeight())];
    const range = this.#range();
    const time = range.from + ((event.clientX - box.left) / box.width) * (range.to - range.from);
    return row?.find((span) => span.start <= time && time <= (span.end ?? range.to)) ?? null;
  }

  #onKey(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter" && this.#selected) this.#open(this.#selected);
    else if (event.key === "+" || event.key === "=") this.#setZoom(this.#zoom + 1);
    else if (event.key === "-") this.#setZoom(this.#zoom - 1);
    else if (event.key === "0") this.#setZoom(-1);
    else if (event.key in steps) this.#move(...steps[event.key]);
    else return;
    event.preventDefault();
  }

  #move(laneStep, spanStep) {
    const rows = this.#lanes.rows;
    const old = this.#selected === null ? null : this.#lanes.get(this.#selected);
    let lane = old ? this.#lanes.laneOf(old.id) + laneStep : 0;
    while (rows[lane]?.length === 0) lane += laneStep || 1;
    const row = rows[lane];
    if (!row) return;
    let at = row.length - 1;
    if (old && laneStep === 0) at = Math.min(Math.max(row.indexOf(old) + spanStep, 0), row.length - 1);
    this.#select(row[at]);
    if (this.#zoom < 0) return;
    const [y, space] = [lane * this.#rowHeight(), this.#canvas.clientHeight - AXIS_HEIGHT];
    if (y < this.#box.scrollTop) this.#box.scrollTop = y;
    else if (y + this.#rowHeight() > this.#box.scrollTop + space) this.#box.scrollTop = y + this.#rowHeight() - space;
  }

  #select(span) {
    const id = span?.id ?? null;
    if (id === this.#selected) return;
    this.#selected = id;
    if (id) this.#describe();
    else this.#hint();
    this.#drawSoon();
  }

  #hint() {
    const perLine = 1 / (this.#rowHeight() * (devicePixelRatio || 1));
    const dense = this.#zoom < 0 && perLine > 1;
    const left = this.#leftOut > 0 ? `${count(this.#leftOut)} more rollouts are in flight than listed. ` : "";
    const lines = dense ? `One line of pixels covers ${Math.ceil(perLine)} lanes: press + to show every lane. ` : "";
    setText(byId("timeline-readout"), `${left}${lines}Point at a rollout, or use the arrow keys; Enter opens it.`);
  }

  #describe() {
    const span = this.#lanes.get(this.#selected);
    if (!span) return this.#select(null);
    const writers = span.intervals.map((i) => `${version(i.policy_version)}: ${short(i.tokens)}`).join(", ");
    const where = span.generator ? `, ${span.generator}` : "";
    const lasted = seconds((span.end ?? this.#time) - span.start);
    const tokens = `${plural(span.tokens, "token")}${writers ? ` (${writers})` : ""}`;
    setText(byId("timeline-readout"), `${span.id}, ${words(span.state)}, ${lasted}, ${tokens}, ${span.worker}${where}`);
    return undefined;
  }

  #renderTable() {
    const box = byId("rollout-table");
    if (!box.firstChild) {
      const names = ["rollout", "state", "for", "tokens", "versions", "worker"];
      const heads = names.map((name) => el("th", { scope: "col", class: name === "rollout" ? "left" : null }, name));
      box.append(el("table", null, el("thead", null, el("tr", null, heads)), el("tbody")), el("p", { class: "note" }));
    }
    const flying = [...this.#lanes.values()].filter((span) => span.end === null).sort((a, b) => a.start - b.start);
    const make = (span) => {
      const open = el("button", { type: "button", class: "link", onclick: () => this.#open(span.id) }, span.id);
      const cells = [1, 2, 3, 4, 5].map(() => el("td"));
      return el("tr", null, el("th", { scope: "row", class: "left" }, open), cells);
    };
    const update = (row, span) => {
      const [, state, time, tokens, versions, worker] = row.children;
      setText(state, words(span.state));
      setText(time, seconds(this.#time - span.start));
      setText(tokens, count(span.tokens));
      const seen = span.intervals.map((i) => i.policy_version);
      const sign = seen.map(colourSign).join();
      if (versions.dataset.seen !== sign) {
        versions.dataset.seen = sign;
        versions.replaceChildren(...seen.map((v) => versionTag(v)).flatMap((tag, at) => (at > 0 ? [" ", tag] : [tag])));
      }
      setText(worker, span.worker);
    };
    reconcile(box.querySelector("tbody"), flying.slice(0, TABLE_ROWS), (span) => span.id, make, update);
    const rest = this.#inFlight - Math.min(flying.length, TABLE_ROWS);
    setText(
      box.lastChild,
      flying.length === 0 ? "No rollout is in flight." : rest > 0 ? `and ${count(rest)} more` : "",
    );
  }
}
