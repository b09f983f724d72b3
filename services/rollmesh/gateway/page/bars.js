// Tables that also show their numbers as bars, so that a screen reader reads the chart as a table.
import { el, reconcile, setText } from "./dom.js";

export class Bars {
  #body = el("tbody");
  #empty = el("p", { class: "empty" });
  #table;

  // heads: [name of the rows, name of the numbers]; caption is for screen readers.
  constructor(box, { heads, caption }) {
    const cells = heads.map((head, at) => el("th", { scope: "col", class: at === 0 ? "left" : null }, head));
    const last = cells.splice(1);
    const header = el(
      "tr",
      null,
      cells,
      last.flatMap((cell) => [el("td", { class: "track", "aria-hidden": "true" }), cell]),
    );
    this.#table = el(
      "table",
      { class: heads.length > 2 ? "bars double" : "bars" },
      el("caption", { class: "unseen" }, caption),
      el("thead", null, header),
      this.#body,
    );
    box.append(this.#table, this.#empty);
  }

  // rows: {key, label, values: [{share 0..1, text}], over}; missing rows are removed; `empty` is the text without rows.
  show(rows, empty) {
    this.#table.hidden = rows.length === 0;
    this.#empty.hidden = rows.length > 0;
    setText(this.#empty, empty);
    const make = (row) => {
      const cells = row.values.flatMap(() => [
        el("td", { class: "track", "aria-hidden": "true" }, el("div", null, el("div"))),
        el("td"),
      ]);
      return el("tr", null, el("th", { scope: "row", class: "left" }), cells);
    };
    reconcile(
      this.#body,
      rows,
      (row) => row.key,
      make,
      (node, row) => {
        node.classList.toggle("over", row.over === true);
        setText(node.firstChild, row.label);
        row.values.forEach(({ share, text }, at) => {
          const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
          const bar = node.children[1 + 2 * at].firstChild.firstChild;
          if (bar.style.width !== width) bar.style.width = width;
          setText(node.children[2 + 2 * at], text);
        });
      },
    );
  }
}
