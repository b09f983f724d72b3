// Tables of generators with their version and load, and of policy versions with their actions.
import { byId, el } from "./dom.js";
import { count, number, plural, short, version, words } from "./format.js";
import { colourSign, versionTag } from "./palette.js";
import { built, Table, text } from "./table.js";

const load = (one) => {
  const full = el("span");
  full.style.width = `${one.slots > 0 ? (100 * Math.min(1, one.running / one.slots)).toFixed(0) : 0}%`;
  const waiting = one.waiting > 0 ? `, ${count(one.waiting)} waiting` : "";
  return [
    el("span", { class: "load", "aria-hidden": "true" }, full),
    `${count(one.running)} of ${count(one.slots)}${waiting}`,
  ];
};

const cache = (one) => {
  const lost = one.preemptions > 0 ? `, ${plural(one.preemptions, "preemption")}` : "";
  return `${short(one.kv_tokens_used)} of ${short(one.kv_token_capacity)} tokens${lost}`;
};

const behind = (one) =>
  one.versions_behind > 0
    ? [versionTag(one.policy_version), ` \u2212${one.versions_behind}`]
    : [versionTag(one.policy_version)];

const serving = (one) =>
  one.serving
    ? el("span", { class: "good" }, "yes")
    : el("span", { class: "warn" }, `no${one.reason ? `: ${words(one.reason)}` : ""}`);

export class GeneratorTable {
  #note = el("p", { class: "note" });
  #table = new Table(
    byId("generator-table"),
    [
      text("address", (one) => one.address, { left: true }),
      built("serving", (one) => [one.serving, one.reason], serving, { left: true, wrap: true }),
      built("version", (one) => [colourSign(one.policy_version), one.versions_behind], behind, { left: true }),
      built("calls in slots", (one) => [one.running, one.slots, one.waiting], load),
      text("KV cache", cache, { minor: true }),
      text("instance", (one) => one.instance_id.slice(0, 8), { minor: true }),
    ],
    "Live generators",
  );

  constructor() {
    byId("generator-table").append(this.#note);
  }

  render(overview) {
    this.#table.show(
      overview.generators,
      (one) => one.instance_id,
      "No generator has registered: waiting for the first one to load a policy.",
    );
    const more = overview.generator_count - overview.generators.length;
    this.#note.hidden = more <= 0;
    this.#note.textContent = more > 0 ? `and ${plural(more, "more generator")}` : "";
  }
}

const score = (one) =>
  one.evaluation
    ? [one.evaluation.mean, one.evaluation.standard_error].filter((value) => value !== null).map(number).join(" \u00b1 ")
    : "";

export class VersionTable {
  #table;
  #list = [];
  #heldByEvaluation = false;

  // actions: {pin(version), rollBack(version), allowed()}
  constructor(actions) {
    const button = (name, style, act, policyVersion) =>
      el(
        "button",
        {
          type: "button",
          class: style,
          disabled: !actions.allowed(),
          "aria-label": `${name} ${version(policyVersion)}`,
          onclick: () => act(policyVersion),
        },
        name,
      );
    const held = () => (this.#heldByEvaluation ? "evaluated" : "pinned");
    const buttons = (one) =>
      el(
        "div",
        { class: "tools" },
        one.pinned ? el("span", { class: "warn" }, held()) : button("Pin", "small", actions.pin, one.policy_version),
        one.newest ? null : button("Roll back", "small danger", actions.rollBack, one.policy_version),
      );
    this.#table = new Table(
      byId("version-table"),
      [
        built(
          "version",
          (one) => colourSign(one.policy_version),
          (one) => versionTag(one.policy_version),
          { left: true },
        ),
        text("step", (one) => count(one.train_step), { minor: true }),
        text("served by", (one) => count(one.generators), { minor: true }),
        text("evaluation", score),
        built("actions", (one) => [one.pinned && held(), one.newest, actions.allowed()], buttons, { unseen: true }),
      ],
      "Announced policy versions, newest first",
    );
  }

  // An evaluation holds its version on one generator, and releases it by itself.
  note(overview) {
    this.#heldByEvaluation = overview.pinned_by === "evaluation";
  }

  // Train step of a version; null if it is not in the list.
  trainStep(policyVersion) {
    return this.#list.find((one) => one.policy_version === policyVersion)?.train_step ?? null;
  }

  show(list) {
    this.#list = list.policies;
    this.render();
  }

  render() {
    this.#table.show(
      this.#list,
      (one) => one.policy_version,
      "No policy yet: waiting for the trainer to announce version 0.",
    );
  }
}
