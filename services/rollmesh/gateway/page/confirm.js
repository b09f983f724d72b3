// Confirmation dialog before data is lost; Escape and Cancel mean no.
import { byId, el } from "./dom.js";

let last = Promise.resolve();

// Resolves to true if the user confirmed. A question that comes while another one is open is asked after it: both share
// the dialog, and one answer must not count for both.
export function confirmed(question) {
  const asked = last.then(() => ask(question));
  last = asked.catch(() => {});
  return asked;
}

function ask({ title, text, verb }) {
  const dialog = byId("confirm");
  return new Promise((resolve) => {
    const cancel = el("button", { type: "button", onclick: () => dialog.close("no") }, "Cancel");
    const agree = el("button", { type: "button", class: "danger", onclick: () => dialog.close("yes") }, verb);
    const buttons = el("div", { class: "tools" }, cancel, agree);
    dialog.replaceChildren(el("div", null, el("h2", { id: "confirm-title" }, title), el("p", null, text), buttons));
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
    cancel.focus();
  });
}
