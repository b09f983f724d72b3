// The list of trajectories: of the queue, or of a trained batch (batch_table.js), page by page.
import * as api from "./api.js";
import { byId, el, setText } from "./dom.js";
import { count, number, NOTHING, plural, version, words } from "./format.js";
import { BatchTable } from "./batch_table.js";
import { colourSign, versionTag } from "./palette.js";
import { Sorting } from "./sorting.js";
import { built, previewColumn, Table, text } from "./table.js";

const STATES = ["pending", "leased", "partial", "resting", "finished", "scored", "unscorable", "dead", "surplus"];
const PAGE = 50;
const NEXT_ROWS = "next"; // a batch is paged by position, not by cursor
const MOST_EMPTY_PAGES = 20;

export class TrajectoryTable {
  #table;
  #sorting;
  #cursor = null;
  #next = null;
  #asked = 0;
  #fail;
  #batches;

  // open(id) shows a trajectory; fail(error) reports a list that could not be read.
  constructor(open, fail) {
    this.#fail = fail;
    const link = (one) => el("button", { type: "button", class: "link", onclick: () => open(one.id) }, one.id);
    const writers = (one) => (one.newest_version === null ? NOTHING : versionTag(one.newest_version));
    const minor = { minor: true };
    this.#table = new Table(
      byId("trajectory-table"),
      [
        built("trajectory", (one) => one.id, link, { left: true }),
        text("state", (one) => words(one.state), { left: true }),
        built("newest tokens", (one) => colourSign(one.newest_version ?? -1), writers, { left: true }),
        text("reward", (one) => number(one.reward)),
        text("tokens", (one) => count(one.tokens)),
        text("birth version", (one) => (one.birth_version === null ? NOTHING : version(one.birth_version)), minor),
        text("attempts", (one) => count(one.attempts), minor),
        text("ended by", (one) => (one.finish_reason ? words(one.finish_reason) : ""), minor),
        text("batch", (one) => count(one.train_step), minor),
        previewColumn,
      ],
      "Trajectories in the queue, oldest group first or sorted",
    );
    this.#sorting = new Sorting(byId("trajectory-table"), "queue", { reward: 3, tokens: 4 }, () => this.#turn(null));
    this.#batches = new BatchTable(open, () => this.#turn(null));
    this.#listen(open);
  }

  // A run that has ended has only its batches.
  end() {
    byId("trajectory-place").value = "batch";
    byId("trajectory-place").hidden = true;
    document.querySelector("label[for=trajectory-place]").hidden = true;
    this.#choosePlace();
  }

  get #inBatch() {
    return byId("trajectory-place").value === "batch";
  }

  #choosePlace() {
    const batch = this.#inBatch;
    for (const [part, hidden] of [
      ["state", batch],
      ["step", !batch],
    ]) {
      byId(`trajectory-${part}`).hidden = hidden;
      document.querySelector(`label[for=trajectory-${part}]`).hidden = hidden;
    }
    byId("trajectory-table").hidden = batch;
    byId("batch-table").hidden = !batch;
    this.#turn(null);
  }

  #listen(open) {
    byId("trajectory-place").addEventListener("change", () => this.#choosePlace());
    const states = byId("trajectory-state");
    states.append(el("option", { value: "" }, "any"), ...STATES.map((state) => el("option", { value: state }, state)));
    states.addEventListener("change", () => this.#turn(null));
    byId("trajectories-first").addEventListener("click", () => this.#turn(null));
    byId("trajectories-next").addEventListener("click", () => this.#turn(this.#next));
    byId("trajectory-filter").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = byId("trajectory-id").value.trim();
      if (id) open(id);
    });
  }

  // cursor: of the queue; null for the first page.
  async #turn(cursor) {
    this.#cursor = cursor;
    this.#batches.turn(cursor !== null);
    try {
      await this.refresh();
      byId(this.#inBatch ? "batch-table" : "trajectory-table").scrollTop = 0;
    } catch (error) {
      this.#fail(error);
    }
  }

  // Refreshes the current page; a response to an outdated request is dropped.
  async refresh() {
    const asked = (this.#asked += 1);
    if (this.#inBatch) {
      const page = await this.#batches.refresh();
      if (page === null || asked !== this.#asked) return;
      byId("trajectories-first").disabled = page.first;
      byId("trajectories-next").disabled = page.last;
      this.#next = NEXT_ROWS;
      setText(byId("trajectories-note"), page.note);
      return;
    }
    const state = byId("trajectory-state").value || null;
    const { order, descending } = this.#sorting;
    const read = (cursor) => api.trajectories({ state, cursor, limit: PAGE, order, descending, preview: true });
    let page = await read(this.#cursor);
    // A page may be short, or empty although more follow: read on until there is a row to show.
    const items = [...page.items];
    for (let more = 0; items.length === 0 && page.next_cursor !== null && more < MOST_EMPTY_PAGES; more += 1) {
      page = await read(page.next_cursor);
      items.push(...page.items);
    }
    if (asked !== this.#asked) return;
    this.#next = page.next_cursor;
    const empty = state
      ? `No trajectory is ${state} on this page.`
      : "The queue is empty: waiting for the first groups.";
    this.#table.show(items, (one) => one.id, empty);
    byId("trajectories-next").disabled = this.#next === null;
    byId("trajectories-first").disabled = this.#cursor === null;
    setText(
      byId("trajectories-note"),
      items.length > 0 ? `${plural(items.length, "trajectory", "trajectories")} shown` : "",
    );
  }
}
