// Summary of the run: key numbers, and the condition it waits for.
import { byId, el, reconcile, setText } from "./dom.js";
import { bytes, count, number, percent, plural, short, version } from "./format.js";

function served(overview) {
  const versions = overview.generators.filter((one) => one.serving).map((one) => one.policy_version);
  if (versions.length === 0) return "not served";
  const [low, high] = [Math.min(...versions), Math.max(...versions)];
  return `served: ${low === high ? version(low) : `${version(low)} to ${version(high)}`}`;
}

function factsOf(overview, goodput) {
  const { report, memory, rates } = overview;
  const flying = overview.trajectories.leased ?? 0;
  const pinned = overview.pinned_version === null ? "" : `, pinned at ${version(overview.pinned_version)}`;
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

export function renderFacts(overview, goodput) {
  const make = ([name]) => el("div", null, el("dt", null, name), el("dd"), el("dd"));
  const update = (node, [, value, note]) => {
    setText(node.children[1], value);
    setText(node.children[2], note);
  };
  reconcile(byId("facts"), factsOf(overview, goodput), ([name]) => name, make, update);
  renderState(overview);
}

function renderState(overview) {
  const pill = byId("run-state");
  if (pill.dataset.state !== overview.state) pill.dataset.state = overview.state;
  setText(pill, overview.state);
  setText(byId("run-name"), overview.run);
  const title = `${overview.run}: ${overview.state}, step ${overview.train_step} of ${overview.train_steps}`;
  if (document.title !== title) document.title = title;
  const line = byId("waiting");
  const text =
    overview.waiting_for ||
    (overview.state === "complete" ? "nothing: the run is complete" : "nothing: the mesh is running");
  if (!line.firstChild) line.append(el("b", null, "Waiting for"), " ", el("span"));
  setText(line.lastChild, text);
}
