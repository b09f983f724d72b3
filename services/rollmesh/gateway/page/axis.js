// Horizontal axes of the charts: their names, ticks, and the text of one position.
import { clock, count, seconds, short } from "./format.js";
import { ticks, tickText } from "./ticks.js";

const NAMES = {
  train_step: "train step",
  policy_version: "policy version",
  time: "time",
  elapsed: "time since the start of each run",
  tokens: "trained tokens",
};
const WIDTHS = { time: 90, elapsed: 90 }; // pixels of a tick
const UNITS = [
  [1, "s", 180],
  [60, "min", 10800],
  [3600, "h", Infinity],
];

export const axisName = (axis) => NAMES[axis];

// Ticks {value, text} inside [from, to] on so many pixels. newest: name of the right end of a time axis.
export function axisTicks(axis, from, to, width, newest) {
  const wanted = Math.max(2, Math.floor(width / (WIDTHS[axis] ?? 60)));
  if (axis === "time") return timeTicks(from, to, wanted, newest);
  if (axis === "elapsed") return elapsedTicks(from, to, wanted);
  if (axis === "tokens") return ticks(from, to, wanted).map((value) => ({ value, text: short(value) }));
  return ticks(from, to, wanted, { integer: true }).map((value) => ({ value, text: count(value) }));
}

// Ticks count back from the newest point, so that they keep their place while the curve moves.
function timeTicks(from, to, wanted, newest) {
  const found = ticks(0, to - from, wanted);
  const back = found.length > 1 ? found : [0];
  return back.map((past) => ({ value: to - past, text: past < 0.5 ? newest : ago(Math.round(past)) }));
}

function ago(past) {
  if (past < 120) return `\u2212${past} s`;
  return past < 7200 ? `\u2212${Math.round(past / 60)} min` : `\u2212${(past / 3600).toFixed(1)} h`;
}

function elapsedTicks(from, to, wanted) {
  const [size, unit] = UNITS.find((one) => to < one[2]);
  const found = ticks(from / size, to / size, wanted);
  const step = found.length > 1 ? found[1] - found[0] : 1;
  return found.map((value) => ({ value: value * size, text: `${tickText(value, step)} ${unit}` }));
}

export function positionText(axis, value) {
  if (axis === "time") return clock(value);
  if (axis === "elapsed") return `after ${seconds(value)}`;
  if (axis === "tokens") return `after ${short(Math.round(value))} tokens`;
  return axis === "policy_version" ? `v${count(value)}` : `step ${count(value)}`;
}
