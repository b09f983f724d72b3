// The end of a run: its result (a run folder that is viewed), or the note on a page that was left open.
import { byId, el, reconcile } from "./dom.js";
import { clock, count } from "./format.js";
import { revealSection } from "./sections.js";

const ENDED = { complete: "finished", failed: "failed" };

// Sections without data where nothing runs.
export const LIVE_SECTIONS = ["rollouts", "queue-states", "generators", "letters", "control"];

// lines: [name, text or node]
function showLines(lines) {
  const make = ([name]) => el("div", { class: "unwrapped" }, el("dt", null, name), el("dd"));
  const update = (node, [, value]) => node.lastChild.replaceChildren(value);
  reconcile(byId("result-lines"), lines, ([name]) => name, make, update);
  revealSection("result");
}

// Result of a viewed run.
export function showResult(overview) {
  const { result } = overview;
  const ended = overview.state === "stopped" ? "stopped" : ENDED[overview.state];
  const steps = `after train step ${count(overview.train_step)} of ${count(overview.train_steps)}`;
  const lines = [["state", `${ended} ${steps}, ${clock(result.time)}`]];
  showLines([...lines, ...result.lines.map((line) => [line.name, line.value])]);
  const goesOn = overview.state === "complete" ? "" : "The command that started the run continues it.";
  const report = result.report ? el("a", { href: "report.html" }, "Report of the run") : null;
  byId("result-links").replaceChildren(...[report, goesOn].filter(Boolean));
}

// Note on a page whose gateway has gone with the run; again() connects once more.
export function showEnd(overview, time, folder, again) {
  const ended = ENDED[overview.state] ?? "stopped";
  const steps = `train step ${count(overview.train_step)} of ${count(overview.train_steps)}`;
  const lines = [["state", `The run ${ended} at ${clock(time)}, after ${steps}.`]];
  if (overview.state === "failed") lines.push(["reason", overview.waiting_for]);
  lines.push(["open it again", el("code", null, `rollmesh view ${folder}`)]);
  lines.push(["report", el("code", null, `${folder}/report.html`)]);
  if (ended === "stopped") lines.push(["continue", "The command that started the run continues it."]);
  showLines(lines);
  byId("result-links").replaceChildren(el("button", { type: "button", onclick: again }, "Connect again"));
  return ended;
}
