// A table with rows kept by key, and a text for the empty table.
import { el, reconcile, setText } from "./dom.js";

const styleOf = (column) => ["left", "wrap", "minor"].filter((name) => column[name]).join(" ") || null;

export class Table {
  #body = el("tbody");
  #empty = el("p", { class: "empty" });
  #table;
  #columns;

  // columns: {name, left, wrap, minor, show(cell, item)}; the first is the row header, minor ones need a wide screen.
  constructor(box, columns, caption) {
    this.#columns = columns;
    const heads = columns.map((column) => {
      const head = el("th", { scope: "col", class: styleOf(column) }, column.name);
      // A column of buttons has a heading only for screen readers.
      if (column.unseen) head.replaceChildren(el("span", { class: "unseen" }, column.name));
      return head;
    });
    const top = el("thead", null, el("tr", null, heads));
    this.#table = el("table", null, el("caption", { class: "unseen" }, caption), top, this.#body);
    box.append(this.#table, this.#empty);
  }

  show(items, keyOf, empty) {
    this.#table.hidden = items.length === 0;
    this.#empty.hidden = items.length > 0;
    setText(this.#empty, items.length > 0 ? "" : empty);
    const make = () => {
      const cells = this.#columns.map((column, at) => {
        const style = styleOf(column);
        return at === 0 ? el("th", { scope: "row", class: style }) : el("td", { class: style });
      });
      return el("tr", null, cells);
    };
    reconcile(this.#body, items, keyOf, make, (row, item) => {
      this.#columns.forEach((column, at) => column.show(row.children[at], item));
    });
  }
}

// A column of plain text.
export const text = (name, valueOf, more = {}) => ({
  name,
  show: (cell, item) => setText(cell, valueOf(item)),
  ...more,
});

// A column whose content is rebuilt only when `signOf(item)` has changed: its buttons keep their focus.
export const built = (name, signOf, build, more = {}) => ({
  name,
  show: (cell, item) => {
    const sign = String(signOf(item));
    if (cell.dataset.sign === sign) return;
    cell.dataset.sign = sign;
    cell.replaceChildren(...[build(item)].flat());
  },
  ...more,
});

// A column with the shortened text of a trajectory, on one line.
export const previewColumn = built(
  "text",
  ({ preview }) => preview,
  ({ preview }) => el("div", { class: "preview", title: preview }, preview ?? ""),
  { left: true },
);
