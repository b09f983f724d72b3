// Dead letters: failed trajectories, with buttons to open, replay or delete them.
import { byId, el, setText } from "./dom.js";
import { clock, count, plural } from "./format.js";
import { built, Table, text } from "./table.js";

export class LetterTable {
  #table;
  #note = el("p", { class: "note" });
  #list = { dead_letters: [], total: 0 };

  // actions: {open(id), replay(id), deleteLetter(id), allowed()}
  constructor(actions) {
    const button = (name, style, act, id) =>
      el(
        "button",
        {
          type: "button",
          class: style,
          disabled: !actions.allowed(),
          "aria-label": `${name} ${id}`,
          onclick: () => act(id),
        },
        name,
      );
    const buttons = (one) =>
      el(
        "div",
        { class: "tools" },
        one.replayed_as
          ? el("span", { class: "note" }, `replayed as ${one.replayed_as}`)
          : button("Replay", "small", actions.replay, one.trajectory_id),
        button("Delete", "small danger", actions.deleteLetter, one.trajectory_id),
      );
    const open = (one) =>
      el(
        "button",
        { type: "button", class: "link", onclick: () => actions.open(one.trajectory_id) },
        one.trajectory_id,
      );
    this.#table = new Table(
      byId("letter-table"),
      [
        built("trajectory", (one) => one.trajectory_id, open, { left: true }),
        text("reason", (one) => one.reason, { left: true, wrap: true }),
        text("time", (one) => clock(one.time), { minor: true }),
        text("attempts", (one) => count(one.attempts), { minor: true }),
        text("tokens", (one) => count(one.tokens), { minor: true }),
        built("actions", (one) => [one.replayed_as, actions.allowed()], buttons, { unseen: true }),
      ],
      "Dead letters, newest first",
    );
    byId("letter-table").append(this.#note);
  }

  show(list) {
    this.#list = list;
    this.render();
  }

  render() {
    const { dead_letters: letters, total } = this.#list;
    this.#table.show(letters, (one) => one.trajectory_id, "None: no trajectory has failed.");
    setText(this.#note, total > letters.length ? `and ${plural(total - letters.length, "older dead letter")}` : "");
  }
}
