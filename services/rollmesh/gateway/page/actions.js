// Actions of the token's holder; actions that lose data ask for confirmation.
import * as api from "./api.js";
import { byId, el, reconcile, setText } from "./dom.js";
import { count, plural, version } from "./format.js";
import { confirmed } from "./confirm.js";

const SERVICES = ["generator", "reward", "rollout"];
const MOST_REPLICAS = 256;

export class Actions {
  #allowed = false;
  #pending = new Set(); // names of the actions that have not ended
  #last = Promise.resolve();
  #changed;
  #overview = null;

  // changed() is called after an action, and when the set of allowed actions changes.
  constructor(changed) {
    this.#changed = changed;
    this.pin = (policyVersion) => this.#act(`pin ${policyVersion}`, () => api.pin(policyVersion));
    this.rollBack = (policyVersion) => this.#rollBack(policyVersion);
    this.replay = (id) => this.#act(`replay ${id}`, () => api.replay(id));
    this.deleteLetter = (id) => this.#deleteLetter(id);
    this.allowed = () => this.#allowed;
    this.#listen();
  }

  #listen() {
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#use(byId("token").value.trim());
    });
    byId("token-forget").addEventListener("click", () => this.#forget());
    byId("pause").addEventListener("click", () => this.#act("pause", api.pause));
    byId("resume").addEventListener("click", () => this.#act("resume", api.resume));
    byId("unpin").addEventListener("click", () => this.#act("unpin", api.unpin));
  }

  // Restores the token of this tab after a reload.
  async restore() {
    if (api.token()) await this.#use(api.token());
    else this.#show();
  }

  async #use(value) {
    setText(byId("action-error"), "");
    setText(byId("action-result"), "");
    if (!value) {
      setText(byId("action-error"), "Enter the token first.");
      byId("token").focus();
      return;
    }
    api.setToken(value);
    try {
      await api.checkToken();
      this.#allowed = true;
      byId("token").value = "";
      setText(byId("action-result"), "Actions are open in this tab.");
    } catch (error) {
      this.#allowed = false;
      // Without a response the token may be valid: it is kept, and checked again after a reload.
      if (error.status === 401) api.setToken("");
      setText(byId("action-error"), error.message);
    }
    this.#show();
    this.#changed();
  }

  #forget() {
    api.setToken("");
    this.#allowed = false;
    byId("token").value = "";
    setText(byId("action-error"), "");
    setText(byId("action-result"), "The token has been removed from this tab.");
    this.#show();
    this.#changed();
  }

  // Actions run one after the other: the page may show the effect of one before its response arrives, and with it the
  // button of the next. A second press of a button whose action has not ended is ignored.
  async #act(name, call) {
    if (this.#pending.has(name)) return;
    if (this.#pending.size === 0) {
      // An action that waited must not remove the error of the one before.
      setText(byId("action-error"), "");
      setText(byId("action-result"), "");
    }
    this.#pending.add(name);
    const run = this.#last.then(() => this.#run(call)).finally(() => this.#pending.delete(name));
    this.#last = run.catch(() => {}); // an error of this action is its caller's; the next one starts all the same
    await run;
  }

  async #run(call) {
    try {
      const done = await call();
      const more = done.group_id ? ` (group ${done.group_id})` : "";
      setText(byId("action-result"), `Done: ${done.done}${more}`);
    } catch (error) {
      setText(byId("action-error"), error.message);
      if (error.status === 401) {
        this.#allowed = false;
        this.#show();
      }
    }
    this.#changed();
  }

  async #rollBack(policyVersion) {
    const title = `Roll back to ${version(policyVersion)}?`;
    const text =
      "The trainer continues from this version under the next version number. All generated tokens that are not yet " +
      "trained are dropped as rolled back. This cannot be undone.";
    if (await confirmed({ title, text, verb: "Roll back" }))
      await this.#act(`roll back ${policyVersion}`, () => api.rollBack(policyVersion));
  }

  async #deleteLetter(id) {
    const text = "Its tokens and its reason are deleted, and it can no longer be replayed. This cannot be undone.";
    if (await confirmed({ title: `Delete the dead letter ${id}?`, text, verb: "Delete" }))
      await this.#act(`delete ${id}`, () => api.deleteLetter(id));
  }

  async #scale(service, input) {
    const wanted = Number(input.value);
    if (input.value === "" || !Number.isInteger(wanted) || wanted < 0 || wanted > MOST_REPLICAS) {
      setText(byId("action-error"), `Replicas of ${service}: enter a whole number from 0 to ${MOST_REPLICAS}.`);
      input.focus();
      return;
    }
    const text = `No ${service} process remains, and the run stops until one is started again.`;
    if (wanted === 0 && !(await confirmed({ title: `Stop every ${service}?`, text, verb: "Stop them" }))) return;
    await this.#act(`scale ${service}`, () => this.#scaled(service, wanted));
  }

  // Asks before it starts more processes than the machine has cores and memory for.
  async #scaled(service, wanted) {
    try {
      return await api.scale(service, wanted, false);
    } catch (error) {
      if (error.status !== 409 || !error.message.includes("use force")) throw error;
      const title = `Start ${wanted} ${service} processes?`;
      if (!(await confirmed({ title, text: error.message, verb: "Start them" }))) throw error;
      return api.scale(service, wanted, true);
    }
  }

  render(overview) {
    this.#overview = overview;
    this.#show();
  }

  #show() {
    const overview = this.#overview;
    const paused = overview?.paused_by_person === true;
    byId("pause").disabled = !this.#allowed || paused;
    byId("resume").disabled = !this.#allowed || (overview !== null && !paused);
    byId("unpin").disabled = !this.#allowed || overview?.pinned_by !== "operator";
    byId("token-forget").hidden = !this.#allowed;
    if (overview) this.#showScale(overview.services.filter((one) => SERVICES.includes(one.service)));
  }

  #showScale(services) {
    const box = byId("scale");
    if (!box.firstChild) box.append(el("h3", null, "Processes on this machine"), el("div"), el("p", { class: "note" }));
    const make = ({ service, running, requested }) => {
      const input = el("input", {
        id: `scale-${service}`,
        type: "number",
        min: 0,
        max: MOST_REPLICAS,
        step: 1,
        value: requested ?? running,
      });
      const button = el(
        "button",
        { type: "button", "aria-label": `Scale ${service}`, onclick: () => this.#scale(service, input) },
        "Scale",
      );
      return el(
        "div",
        { class: "scale" },
        el("label", { for: `scale-${service}` }, service),
        input,
        button,
        el("span", { class: "note" }),
      );
    };
    const update = (node, { running, requested }) => {
      node.children[1].disabled = !this.#allowed;
      node.children[2].disabled = !this.#allowed;
      const asked = requested !== null && requested !== running ? `, ${count(requested)} requested` : "";
      setText(node.lastChild, `${count(running)} running${asked}`);
    };
    reconcile(box.children[1], services, (one) => one.service, make, update);
    const none = "Scaling works for runs whose folder is on the gateway's machine; otherwise the orchestrator scales.";
    setText(
      box.lastChild,
      services.length === 0
        ? none
        : `A surplus process is drained and loses no work (at most ${plural(MOST_REPLICAS, "process", "processes")} each).`,
    );
  }
}
