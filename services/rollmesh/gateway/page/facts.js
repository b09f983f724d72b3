// Summary of the run: key numbers, and the condition it waits for.
import { byId, el, reconcile, setText } from "./dom.js";
import { bytes, count, number, percent, plural, seconds, short, version } from "./format.js";

function served(overview) {
  const versions = overview.generators.filter((one) => one.serving).map((one) => one.policy_version);
  if (versions.length === 0) return "not served";
  const [low, high] = [Math.min(...versions), Math.max(...versions)];
  return `served: ${low === high ? version(low) : `${version(low)} to ${version(high)}`}`;
}

function factsOf(overview, goodput) {
  const { report, memory, rates } = overview;
  const flying = overview.trajectories.leased ?? 0;
  const holder = overview.pinned_by === "evaluation" ? "held by an evaluation at" : "pinned at";
  const pinned = overview.pinned_version === null ? "" : `, ${holder} ${version(overview.pinned_version)}`;
  const rollback = overview.rollback_to === null ? "" : `, rolling back to ${version(overview.rollback_to)}`;
  const room = memory.max_bytes > 0 ? `of ${bytes(memory.max_bytes)}` : "no limit";
  return [
    [
      "Train step",
      count(overview.train_step),
      `of ${count(overview.train_steps)}, batch ${count(overview.cut_step)} cut`,
    ],
    ["Policy version", version(overview.newest_version), `${served(overview)}${pinned}${rollback}`],
    ["In flight", count(flying), `of ${count(overview.pool_size)}, ${plural(overview.workers, "worker")}`],
    [
      "Saved tokens",
      `${short(Math.round(rates.saved_tokens_per_second))}/s`,
      `${number(rates.finished_per_second)} rollouts/s`,
    ],
    ["Goodput", percent(goodput), "trained of generated tokens"],
    ["Reward", number(report?.reward_mean), report ? `mean of step ${count(report.train_step)}` : "no step yet"],
    ["Staleness", number(report?.staleness_mean), `steps, bound ${count(overview.staleness.bound)}`],
    [
      "Queue memory",
      bytes(memory.used_bytes),
      `${room}${memory.ratio > 0 ? `, ${percent(memory.ratio)} reserved` : ""}`,
    ],
  ];
}

// Facts of a run that has ended: nothing is served, in flight or in memory any more.
function factsOfEnded(overview, goodput) {
  const { report, evaluations, totals } = overview;
  const newest = evaluations.at(-1);
  const first = evaluations.length > 1 ? `v${evaluations[0].policy_version}: ${number(evaluations[0].mean)}` : "";
  return [
    ["Train step", count(overview.train_step), `of ${count(overview.train_steps)}`],
    ["Policy version", version(overview.newest_version), "the newest one"],
    ["Reward", number(report?.reward_mean), report ? `mean of step ${count(report.train_step)}` : "no step"],
    ["Evaluation", number(newest?.mean), newest ? `v${newest.policy_version}; ${first}`.replace(/; $/, "") : "none"],
    ["Response length", number(report?.response_length_mean), "tokens, mean of the last step"],
    ["Saved tokens", short(totals.saved_tokens_total), `${short(totals.finished_total)} rollouts`],
    ["Goodput", percent(goodput), "trained of generated tokens"],
    ["Staleness", number(report?.staleness_mean), `steps, bound ${count(overview.staleness.bound)}`],
  ];
}

export function renderFacts(overview, goodput) {
  const make = ([name]) => el("div", null, el("dt", null, name), el("dd"), el("dd"));
  const update = (node, [, value, note]) => {
    setText(node.children[1], value);
    setText(node.children[2], note);
  };
  const facts = overview.result === null ? factsOf(overview, goodput) : factsOfEnded(overview, goodput);
  reconcile(byId("facts"), facts, ([name]) => name, make, update);
  renderState(overview);
}

// A pause by the launcher is no operator's pause: it evaluates, and resumes by itself.
function stateText({ state, paused_by: by }) {
  if (state === "complete") return "finished";
  if (state !== "paused") return state;
  if (by.includes("operator")) return "paused by the operator";
  return by.includes("launcher") ? "evaluating" : "paused";
}

function renderState(overview) {
  const pill = byId("run-state");
  if (pill.dataset.state !== overview.state) pill.dataset.state = overview.state;
  const state = stateText(overview);
  setText(pill, state);
  setText(byId("run-name"), overview.run);
  const title = `${overview.run}: ${state}, step ${overview.train_step} of ${overview.train_steps}`;
  if (document.title !== title) document.title = title;
  const line = byId("waiting");
  if (!line.firstChild) line.append(el("span"), el("span"), el("span", { class: "time" }));
  const [what, why, time] = line.children;
  const waits = overview.result === null;
  setText(what, waits ? "Waiting for " : "");
  const nothing = overview.state === "complete" ? "nothing: the run is complete" : "nothing: the mesh is running";
  setText(why, waits ? overview.waiting_for || nothing : overview.waiting_for);
  setText(time, timeText(overview));
}

function timeText({ elapsed_seconds: elapsed, remaining_seconds: left, result }) {
  if (elapsed === null) return "";
  const rest = left === null ? "" : `, about ${seconds(left)} to the last step`;
  return result === null ? `Elapsed ${seconds(elapsed)}${rest}` : `Ran for ${seconds(elapsed)}`;
}
