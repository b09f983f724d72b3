// Column heads that sort a table: one press for the lowest values on top, two for the highest, three for its own order.
import { el, setAttribute, setText } from "./dom.js";

export class Sorting {
  #own;
  #heads = new Map();
  order;
  descending = false;

  // own: name of the order without sorting; columns: index of the column by name of the order; changed() asks for rows.
  constructor(box, own, columns, changed) {
    this.#own = own;
    this.order = own;
    const heads = box.querySelectorAll("thead th");
    for (const [order, at] of Object.entries(columns)) {
      const press = () => {
        this.#press(order);
        changed();
      };
      heads[at].replaceChildren(el("button", { type: "button", class: "sort", onclick: press }, order));
      this.#heads.set(order, heads[at]);
    }
  }

  #press(order) {
    if (this.order !== order) [this.order, this.descending] = [order, false];
    else if (!this.descending) this.descending = true;
    else [this.order, this.descending] = [this.#own, false];
    for (const [name, head] of this.#heads) {
      const sorted = this.order === name ? (this.descending ? "descending" : "ascending") : null;
      setAttribute(head, "aria-sort", sorted);
      setText(head.firstChild, `${name}${sorted === null ? "" : sorted === "ascending" ? " \u2191" : " \u2193"}`);
    }
  }
}
