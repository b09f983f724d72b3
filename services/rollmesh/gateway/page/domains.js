// Table of the domains of the prompts; hidden in a run without domains.
import { byId, el, setHidden } from "./dom.js";
import { count, percent, plural, short } from "./format.js";
import { Table, text } from "./table.js";

const share = (part, whole) => percent(whole > 0 ? part / whole : null);

export class DomainTable {
  #total = 0; // completed trajectories of all listed domains
  #note = el("p", { class: "note" });
  #table = new Table(
    byId("domain-table"),
    [
      text("domain", (one) => one.domain, { left: true }),
      text("groups drawn", (one) => count(one.drawn)),
      text("completed", (one) => `${count(one.completed)} (${share(one.completed, this.#total)})`),
      text("solved", (one) => share(one.solved, one.completed)),
      text("tokens", (one) => short(one.tokens), { minor: true }),
      text("tokens each", (one) => count(one.completed > 0 ? one.tokens / one.completed : null), { minor: true }),
    ],
    "Groups, completed and solved trajectories and tokens by domain of the prompts",
  );

  constructor() {
    byId("domain-table").append(this.#note);
  }

  render({ domains, domain_count: known }) {
    setHidden(byId("domains"), domains.length === 0);
    this.#total = domains.reduce((sum, one) => sum + one.completed, 0);
    this.#table.show(domains, (one) => one.domain, "");
    const more = known - domains.length;
    this.#note.hidden = more <= 0;
    this.#note.textContent = more > 0 ? `and ${plural(more, "more domain")}` : "";
  }
}
