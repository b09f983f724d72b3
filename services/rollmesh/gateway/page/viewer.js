// The trajectory viewer: a modal dialog; Escape closes it and returns the focus.
import * as api from "./api.js";
import { byId, el, setText } from "./dom.js";
import { count, NOTHING, number, plural, version, words } from "./format.js";
import { legend, Tokens } from "./tokens.js";

const PAGE_TOKENS = 2000;

const fact = (name, value) => [el("dt", null, name), el("dd", null, value)];

export class Viewer {
  #dialog = byId("viewer");
  #title = el("h2", { id: "viewer-title", tabindex: -1 });
  #body = el("div", { class: "body" });
  #foot = el("p", { "aria-live": "polite" });
  #tokens;
  #detail = null;
  #asked = 0;
  #asIds = false;
  #trainStepOf;
  #current;

  // trainStepOf(version) and current(): train steps, for the staleness of tokens.
  constructor(trainStepOf, current) {
    this.#trainStepOf = trainStepOf;
    this.#current = current;
    this.#tokens = new Tokens(
      (text) => setText(this.#foot, text || this.#hint()),
      (v) => this.#staleness(v),
    );
    const close = el("button", { type: "button", onclick: () => this.#dialog.close() }, "Close");
    this.#dialog.append(
      el("div", { class: "top" }, this.#title, close),
      this.#body,
      el("div", { class: "foot" }, this.#foot),
    );
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close(); // the backdrop
    });
    this.#dialog.addEventListener("close", () => {
      this.#asked += 1;
      this.#detail = null;
      this.#body.replaceChildren();
      this.#tokens.show([], false);
    });
  }

  async open(id, first = 0) {
    const asked = (this.#asked += 1);
    if (!this.#dialog.open) this.#dialog.showModal();
    setText(this.#title, `Trajectory ${id}`);
    if (this.#detail?.id !== id) this.#body.replaceChildren(el("p", { class: "empty" }, "Loading\u2026"));
    setText(this.#foot, this.#hint());
    try {
      const detail = await api.trajectory(id, first, PAGE_TOKENS);
      if (asked === this.#asked) this.#show(detail);
    } catch (error) {
      if (asked === this.#asked) this.#body.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    }
  }

  #hint() {
    return "Point at a token, or use the arrow keys: left and right by token, up and down by version. Escape closes.";
  }

  // Train steps between a version and the step that trains on the trajectory (or the next step, if none has yet).
  #staleness(policyVersion) {
    const written = this.#trainStepOf(policyVersion);
    if (written === null) return null;
    const batch = this.#detail.train_step;
    return Math.max(0, (batch === null ? this.#current() : batch - 1) - written);
  }

  #show(detail) {
    this.#detail = detail;
    const columns = el("div", { class: "cols" }, this.#facts(detail), this.#reward(detail));
    this.#tokens.show(detail.runs, this.#asIds);
    this.#body.replaceChildren(
      columns,
      ...this.#members(detail),
      el("h3", null, "Tokens by policy version"),
      legend(detail.runs),
      this.#pager(detail),
      detail.runs.length > 0
        ? this.#tokens.node
        : el(
            "p",
            { class: "empty" },
            "No tokens are stored: none have been saved yet, or they were deleted after training.",
          ),
      ...this.#metadata(detail),
    );
    this.#body.scrollTop = 0;
    // The pressed button disappeared with the old body: the title takes the focus.
    if (!this.#dialog.contains(document.activeElement)) this.#title.focus();
  }

  #facts(detail) {
    const state =
      words(detail.state) +
      (detail.found_in === "dead_letter"
        ? " (read from its dead letter)"
        : detail.found_in === "batch"
          ? " (read from its batch file)"
          : "");
    return el(
      "dl",
      null,
      fact("state", state),
      fact("ended by", detail.finish_reason ? words(detail.finish_reason) : NOTHING),
      fact("tokens", `${count(detail.prompt_tokens)} of the prompt, ${count(detail.response_tokens)} after it`),
      fact("versions", detail.policy_versions.map(version).join(", ") || NOTHING),
      fact("birth version", version(detail.birth_version)),
      fact("batch", detail.train_step === null ? "none yet" : `step ${count(detail.train_step)}`),
      fact("worker", detail.worker || NOTHING),
      detail.history.flatMap((sentence) => fact("history", sentence)),
      detail.teacher ? fact("teacher", detail.teacher) : null,
      detail.traceparent ? fact("trace", el("code", null, detail.traceparent)) : null,
    );
  }

  #reward({ outcome, shaped_reward: shaped, verifier }) {
    const parts = Object.entries(outcome?.parts ?? {}).flatMap(([name, value]) =>
      fact(`part: ${words(name)}`, number(value)),
    );
    return el(
      "dl",
      null,
      fact("reward", shaped === null ? "not scored yet" : number(shaped)),
      fact(
        "outcome",
        outcome
          ? `${words(outcome.kind)}${outcome.kind === "scored" ? ` ${number(outcome.value)}, before shaping` : ""}`
          : NOTHING,
      ),
      parts,
      outcome?.message ? fact("verifier message", outcome.message) : null,
      fact("verifier", verifier || NOTHING),
    );
  }

  #members({ id, members, member_rewards: rewards }) {
    if (members.length < 2) return [];
    const label = (member, at) =>
      typeof rewards[at] === "number" ? [member, el("span", { class: "note" }, ` reward ${number(rewards[at])}`)] : member;
    const buttons = members.map((member, position) =>
      el(
        "button",
        {
          type: "button",
          class: "small",
          "aria-current": member === id ? "true" : null,
          onclick: () => this.open(member),
        },
        ...[label(member, position)].flat(),
      ),
    );
    return [el("h3", null, "Group"), el("div", { class: "members" }, buttons)];
  }

  #metadata({ prompt_metadata: metadata }) {
    if (Object.keys(metadata).length === 0) return [];
    return [
      el(
        "details",
        null,
        el("summary", null, "Prompt metadata for the verifier"),
        el("pre", { tabindex: 0 }, JSON.stringify(metadata, null, 2)),
      ),
    ];
  }

  #pager(detail) {
    const total = detail.prompt_tokens + detail.response_tokens;
    const listed = detail.runs.reduce((sum, run) => sum + run.token_ids.length, 0);
    const page = (name, first) =>
      el(
        "button",
        { type: "button", class: "small", disabled: first === null, onclick: () => this.open(detail.id, first) },
        name,
      );
    const nodes = [];
    if (detail.runs.some((run) => run.texts !== null)) {
      nodes.push(
        el(
          "button",
          { type: "button", class: "small", "aria-pressed": String(this.#asIds), onclick: () => this.#toggleIds() },
          "Token ids",
        ),
      );
    }
    if (listed < total) {
      const before = detail.first_token > 0 ? Math.max(0, detail.first_token - PAGE_TOKENS) : null;
      nodes.push(page("Earlier tokens", before), page("Later tokens", detail.next_token));
      nodes.push(
        el(
          "span",
          { class: "note" },
          `${count(detail.first_token + 1)} to ${count(detail.first_token + listed)} of ${plural(total, "token")}, including the prompt`,
        ),
      );
    }
    return el("div", { class: "pager" }, nodes);
  }

  #toggleIds() {
    this.#asIds = !this.#asIds;
    this.#show(this.#detail);
    this.#body.querySelector("[aria-pressed]").focus();
  }
}
