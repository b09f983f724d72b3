// Trained trajectories of one step, from its batch file: sorted by the gateway, page by page.
import * as api from "./api.js";
import { byId, el } from "./dom.js";
import { count, number, plural, words } from "./format.js";
import { colourSign, versionTag } from "./palette.js";
import { Sorting } from "./sorting.js";
import { built, previewColumn, Table, text } from "./table.js";

const PAGE = 50;
const NEWEST = "newest";

export class BatchTable {
  #table;
  #steps = [];
  #sorting;
  #first = 0;
  #asked = 0;
  #page = { items: [], first: 0, total: 0 };
  #shown = ""; // request of the rows on the page: a batch file never changes

  // open(id) shows a trajectory; changed() asks for a refresh.
  constructor(open, changed) {
    const link = (one) => el("button", { type: "button", class: "link", onclick: () => open(one.id) }, one.id);
    const writers = ({ policy_versions: all }) =>
      all.length === 0 ? "" : all.length === 1 ? versionTag(all[0]) : [versionTag(all[0]), " to ", versionTag(all.at(-1))];
    this.#table = new Table(
      byId("batch-table"),
      [
        built("trajectory", (one) => one.id, link, { left: true }),
        text("reward", (one) => number(one.reward)),
        text("tokens", (one) => count(one.tokens)),
        built("versions", (one) => one.policy_versions.map(colourSign), writers, { left: true }),
        text("ended by", (one) => (one.finish_reason ? words(one.finish_reason) : ""), { minor: true }),
        previewColumn,
      ],
      "Trained trajectories of one batch",
    );
    this.#sorting = new Sorting(byId("batch-table"), "batch", { reward: 1, tokens: 2 }, () => {
      this.#first = 0;
      changed();
    });
    byId("trajectory-step").addEventListener("change", () => {
      this.#first = 0;
      changed();
    });
  }

  turn(forward) {
    this.#first = forward ? this.#first + PAGE : 0;
  }

  // Returns whether there is a page before and after this one, and a note.
  async refresh() {
    const asked = (this.#asked += 1);
    const { train_steps: steps } = await api.batches();
    if (asked !== this.#asked) return null;
    this.#offer(steps);
    const step = byId("trajectory-step").value === NEWEST ? steps[0] : Number(byId("trajectory-step").value);
    if (!step) {
      this.#table.show([], (one) => one.id, "No batch file can be read here: waiting for the first train step.");
      return { first: true, last: true, note: "" };
    }
    const { order, descending } = this.#sorting;
    const request = { order, descending, first: this.#first, limit: PAGE };
    const sign = JSON.stringify([step, request]);
    if (sign !== this.#shown) {
      const page = await api.batch(step, request);
      if (asked !== this.#asked) return null;
      if (page.items.length === 0 && page.total > 0) {
        this.#first = 0; // beyond the end, as in the newest step if it has fewer rows
        return this.refresh();
      }
      this.#shown = sign;
      this.#page = page;
    }
    const { items, first, total } = this.#page;
    this.#table.show(items, (one) => one.id, "No trajectory on this page.");
    const note = `step ${count(step)}: ${count(first + 1)} to ${count(first + items.length)} of ${plural(total, "trajectory", "trajectories")}`;
    return { first: first === 0, last: first + items.length >= total, note };
  }

  #offer(steps) {
    if (String(steps) === String(this.#steps)) return;
    this.#steps = steps;
    const select = byId("trajectory-step");
    const before = select.value || NEWEST;
    const options = steps.map((step) => el("option", { value: step }, count(step)));
    select.replaceChildren(el("option", { value: NEWEST }, "newest"), ...options);
    select.value = [NEWEST, ...steps.map(String)].includes(before) ? before : NEWEST;
  }
}
