// Tokens of a trajectory as coloured text; one tab stop, arrow keys inside, one line of text about one token.
import { el, setText } from "./dom.js";
import { count, NOTHING, number, plural, version } from "./format.js";
import { Ramp, shade } from "./palette.js";

const NEWLINE = "\u21b5\n";
const NO_TEXT = "\u25ab"; // a later token completes the character

const textOf = (run, at) => {
  if (!run.texts) return String(run.token_ids[at]);
  const text = run.texts[at];
  return text === "" ? NO_TEXT : text.replaceAll("\n", NEWLINE);
};

function markOf(run) {
  if (run.source !== "policy") return `${run.source}, ${plural(run.token_ids.length, "token")}`;
  const older = run.kv_min_version !== null && run.kv_min_version < run.policy_version;
  return version(run.policy_version) + (older ? ` (cache of ${version(run.kv_min_version)})` : "");
}

export class Tokens {
  #box = el("div", {
    class: "tokens",
    tabindex: 0,
    role: "group",
    "aria-label": "Tokens; use the arrow keys to move between them",
  });
  #flat = []; // {node, run, at}
  #at = -1;
  #say;
  #staleness;
  #chosen = null; // token selected by keyboard, which remains selected when the pointer leaves

  // say(text) shows text about a token; staleness(version) is in train steps, or null.
  constructor(say, staleness) {
    this.#say = say;
    this.#staleness = staleness;
    this.#box.addEventListener("pointerover", (event) => this.#over(event.target));
    this.#box.addEventListener("pointerleave", () => this.#point(this.#chosen ?? -1));
    this.#box.addEventListener("click", (event) => {
      this.#over(event.target);
      this.#chosen = this.#at;
    });
    this.#box.addEventListener("keydown", (event) => this.#onKey(event));
  }

  get node() {
    return this.#box;
  }

  show(runs, asIds) {
    this.#flat = [];
    this.#at = -1;
    this.#chosen = null;
    const ramp = rampOf(runs);
    const blocks = runs.map((run) => this.#runNode(asIds ? { ...run, texts: null } : run, ramp));
    this.#box.replaceChildren(...blocks);
  }

  #runNode(run, ramp) {
    const mark = el("span", { class: "mark" }, markOf(run));
    const node = el("span", { class: `run ${run.source}${run.texts ? "" : " ids"}` }, mark);
    if (run.source === "policy") shade(node, run.policy_version, ramp);
    run.token_ids.forEach((_, at) => {
      const token = el("span", { class: run.texts ? "t" : "t id", "data-i": this.#flat.length }, textOf(run, at));
      this.#flat.push({ node: token, run, at });
      node.append(token);
    });
    return node;
  }

  #over(target) {
    const index = target.closest?.("[data-i]")?.dataset.i;
    if (index !== undefined) this.#point(Number(index));
  }

  #onKey(event) {
    const last = this.#flat.length - 1;
    const next = {
      ArrowRight: this.#at + 1,
      ArrowLeft: this.#at - 1,
      ArrowDown: this.#neighbourRun(1),
      ArrowUp: this.#neighbourRun(-1),
      Home: 0,
      End: last,
    }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.#chosen = Math.min(Math.max(next, 0), last);
    this.#point(this.#chosen);
    this.#flat[this.#at].node.scrollIntoView({ block: "nearest" });
  }

  // First token of the next or previous run: moves between versions.
  #neighbourRun(step) {
    if (this.#at < 0) return 0;
    const { run } = this.#flat[this.#at];
    let at = this.#at;
    while (this.#flat[at]?.run === run) at += step;
    const found = this.#flat[at];
    return found ? at - (step < 0 ? found.at : 0) : this.#at;
  }

  #point(index) {
    if (index === this.#at) return;
    this.#flat[this.#at]?.node.classList.remove("on");
    this.#at = index;
    const token = this.#flat[index];
    token?.node.classList.add("on");
    this.#say(token ? this.#words(token) : "");
  }

  #words({ run, at }) {
    const text = run.texts?.[at];
    const what = text === undefined ? "" : text === "" ? " (part of a character)" : ` ${JSON.stringify(text)}`;
    const where = `token ${count(run.position + at)}, id ${run.token_ids[at]}${what}`;
    if (run.source !== "policy") return `${where}: written by the ${run.source}, not trained on`;
    const logprob = run.logprobs?.[at];
    const probability = typeof logprob === "number" ? ` (p = ${number(Math.exp(logprob))})` : "";
    const stale = this.#staleness(run.policy_version);
    const parts = [
      `logprob ${typeof logprob === "number" ? logprob.toFixed(4) : NOTHING} nats${probability}`,
      `policy version ${version(run.policy_version)}`,
      `staleness ${stale === null ? "unknown" : plural(stale, "train step")}`,
      `temperature ${number(run.temperature)}`,
    ];
    const taught = run.teacher_logprobs?.[at];
    if (typeof taught === "number") parts.splice(1, 0, `${taught.toFixed(4)} nats by its teacher`);
    if (run.kept_counts?.[at]) parts.push(`drawn from ${plural(run.kept_counts[at], "kept token")}`);
    if (run.kv_min_version < run.policy_version) parts.push(`cache from ${version(run.kv_min_version)} on`);
    return `${where}: ${parts.join(", ")}`;
  }
}

// The ramp of one trajectory: its few versions are told apart better than on the ramp of the whole page.
function rampOf(runs) {
  const versions = runs.filter((run) => run.source === "policy").map((run) => run.policy_version);
  return new Ramp(Math.min(...versions), Math.max(...versions));
}

// Legend of the colours: number of tokens per version in these runs, with its swatch.
export function legend(runs) {
  const tokens = new Map();
  for (const run of runs) {
    if (run.source === "policy")
      tokens.set(run.policy_version, (tokens.get(run.policy_version) ?? 0) + run.token_ids.length);
  }
  const node = el("div", { class: "legend" });
  const ramp = rampOf(runs);
  for (const [policyVersion, n] of [...tokens].sort((a, b) => a[0] - b[0])) {
    const label = el("span", { class: "version" }, el("b", null, version(policyVersion)), ` ${plural(n, "token")}`);
    node.append(shade(label, policyVersion, ramp));
  }
  if (tokens.size === 0) setText(node, "No token of the policy on this page.");
  return node;
}
