// The mesh over a run that has ended: running calls by policy version, and the queue by state.
import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { number, version, words } from "./format.js";
import { tickText } from "./ticks.js";
import { viewed } from "./curve_view.js";
import { inSight, onColours } from "./palette.js";
import { revealSection } from "./sections.js";

const PAINTS = {
  leased: "var(--accent)",
  finished: "var(--good)",
  partial: "var(--warn)",
  resting: "var(--ramp3)",
  pending: "var(--soft)",
};
const NAMES = { finished: "waiting for reward" };

// Text of a value, or with an axis step that of a tick.
export const write = (value, step = 0) => (step > 0 ? tickText(value, step) : number(value));

export function showHistory(history) {
  if (history === null) return;
  revealSection("history");
  let zoom = null;
  const x = history.time.map((time) => time - history.time[0]);
  const chart = (title, more) => new Chart({ title, waitsFor: "the first records", format: write, zoom: zoomTo, ...more });
  const running = chart("Running calls by policy version", { unnamed: true });
  const queue = chart("Trajectories by state");
  const groups = chart("Groups");
  const show = () => {
    const drawn = (series) => series.map((one) => viewed(one, { zoom }));
    const states = Object.entries(history.trajectories).map(([name, values]) => ({
      id: name,
      label: NAMES[name] ?? words(name),
      paint: PAINTS[name],
      values,
    }));
    running.show(drawn([...stacked(byVersion(history.running, x), x), line("slots", x, history.slots, 1)]), write, "end");
    queue.show(drawn(stacked(states, x)), write, "end");
    const byState = Object.entries(history.groups);
    groups.show(drawn(byState.map(([name, values], at) => line(name, x, values, at))), write, "end");
  };
  function zoomTo(range) {
    zoom = range;
    show();
  }
  byId("history-grid").append(running.node, queue.node, groups.node);
  onColours(show);
  show();
}

// A line over the seconds x.
export const line = (name, x, values, colour) => ({ id: name, label: name, colour, axis: "elapsed", x, mean: values, low: values, high: values });

// Values by policy version over all moments x, in the colours of the page.
export const byVersion = (parts, x) =>
  parts.map(({ policy_version: policyVersion, first, calls }) => ({
    id: version(policyVersion),
    label: version(policyVersion),
    paint: inSight().colour(policyVersion),
    values: x.map((_, at) => calls[at - first] ?? 0),
  }));

// Areas on top of each other, the first one at the bottom.
export function stacked(parts, x) {
  let base = x.map(() => 0);
  return parts.map(({ values, ...part }) => {
    const low = base;
    base = values.map((value, at) => value + low[at]);
    return { ...part, axis: "elapsed", x, mean: values, low, high: base };
  });
}
