// The page of simulated arms (sim/simulation_page.py): figures by arm, times of updates, running calls, generators.
import { recordedAnswer } from "./api.js";
import { Bars } from "./bars.js";
import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { number, percent, seconds, short } from "./format.js";
import { byVersion, line, stacked, write } from "./history.js";
import { setSight } from "./palette.js";

const arms = recordedAnswer("arms");

function showFigures() {
  const most = (name) => Math.max(...arms.map((arm) => arm[name]), 1e-9);
  const [fastest, stalest] = [most("tokens_per_second"), most("mean_staleness")];
  const shares = ({ staleness }) => {
    const total = Object.values(staleness).reduce((sum, n) => sum + n, 0);
    return Object.entries(staleness).map(([steps, n]) => `${steps}: ${percent(n / total)}`);
  };
  const rows = arms.map((arm) => ({
    key: arm.name,
    label: arm.best ? `${arm.name} (best)` : arm.name,
    values: [
      { share: arm.tokens_per_second / fastest, text: short(Math.round(arm.tokens_per_second)) },
      { share: arm.mean_staleness / stalest, text: [number(arm.mean_staleness), ...shares(arm)].join("; ") },
    ],
  }));
  const heads = ["arm", "trained tokens per second", "mean staleness; share of trajectories by staleness"];
  new Bars(byId("arms"), { heads, caption: "Figures by arm" }).show(rows, "");
}

function addChart(title, series, more = {}) {
  const chart = new Chart({ title, waitsFor: "", format: write, zoom: () => {}, ...more });
  byId("arm-charts").append(chart.node);
  chart.show(series, more.format ?? write, "end");
}

const updates = arms.map(({ name, update_seconds: values }, at) => ({
  ...line(name, values.map((_, step) => step + 1), values, at),
  axis: "train_step",
}));
setSight(0, Math.max(0, ...arms.flatMap((arm) => arm.running.map((one) => one.policy_version))));
showFigures();
addChart("Virtual seconds of an update", updates, { format: (value, step = 0) => (step > 0 ? write(value, step) : seconds(value)) });
for (const { name, time, slots, running, generators } of arms) {
  const calls = [...stacked(byVersion(running, time), time), line("slots", time, slots, 1)];
  addChart(`Running calls by policy version: ${name}`, calls, { unnamed: true });
  addChart(`Generators by policy version: ${name}`, stacked(byVersion(generators, time), time), { unnamed: true });
}
