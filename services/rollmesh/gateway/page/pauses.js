// Pauses of a run on an axis of time: no line is drawn from the last point of a session to the first of the next one.
const LEAST_SECONDS = 15;
const FACTOR = 10; // of the usual time between two points

// Parts of `points` without a pause, in order. xs: their places on the axis, ascending.
export function partsOf(axis, xs, points) {
  if (axis !== "time" && axis !== "elapsed") return [points];
  const spans = xs.slice(1).map((x, at) => x - xs[at]);
  const usual = [...spans].sort((a, b) => a - b)[spans.length >> 1] ?? 0;
  const ends = spans.flatMap((span, at) => (span > Math.max(LEAST_SECONDS, FACTOR * usual) ? [at + 1] : []));
  return [0, ...ends].map((from, at) => points.slice(from, ends[at]));
}
