// The end of a run: its result (a run folder that is viewed, or report.html), or the note on a page that was left open.
import { isFile } from "./api.js";
import { byId, el, reconcile } from "./dom.js";
import { clock, count, number, version } from "./format.js";
import { showHistory } from "./history.js";
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
  byId("result-remarks").replaceChildren(
    ...result.remarks.map(({ text, bad }) => el("li", { class: bad ? "bad" : null }, text)),
    ...result.missing.map((text) => el("li", { class: "note" }, `missing: ${text}`)),
  );
  showHistory(result.history);
  for (const table of result.tables) showTable(table);
  showSamples(result.samples);
  showLogs(result.logs);
  if (isFile) document.querySelector("footer a").hidden = true; // the description of an API that nothing serves
}

function showTable({ name, heads, rows, note }) {
  const wrapped = name === "audit";
  const style = (at) => (wrapped ? "left wrap" : at === 0 ? "left" : null);
  const top = heads.map((head, at) => el("th", { scope: "col", class: style(at) }, head));
  const body = rows.map((row) =>
    el("tr", null, row.map((cell, at) => el(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: style(at) }, cell))),
  );
  const table = el("table", null, el("thead", null, el("tr", null, top)), el("tbody", null, body));
  byId(name).querySelector(".scroll").replaceChildren(table);
  if (note) byId(name).append(el("p", { class: "note" }, note));
  revealSection(name);
}

function showSamples(samples) {
  if (samples.length === 0) return;
  const tag = (name, value) => el("span", null, `${name} `, el("b", null, value));
  byId("sample-list").replaceChildren(
    ...samples.map((one) =>
      el(
        "div",
        { class: "sample" },
        el(
          "p",
          { class: "legend" },
          tag("step", count(one.train_step)),
          tag("reward", number(one.reward)),
          tag("policy versions", one.policy_versions.map(version).join(", ")),
          el("span", null, one.trajectory_id),
        ),
        el("pre", null, one.prompt),
        el("pre", null, one.completion),
      ),
    ),
  );
  revealSection("samples");
}

function showLogs(logs) {
  if (logs.length === 0) return;
  const link = ({ name, value }) => el("li", null, el("a", { href: name }, name), el("span", { class: "note" }, ` ${value}`));
  byId("log-list").replaceChildren(...logs.map(link));
  revealSection("logs");
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
