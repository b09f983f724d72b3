// A curve as it is looked at: by time instead of by step, smoothed, and inside the zoomed range.

const LISTS = ["x", "mean", "low", "high"];

// Mean of up to `size` neighbours of every value; the ends have fewer.
export function smoothed(values, size) {
  const half = Math.floor(size / 2);
  return values.map((_, at) => {
    const part = values.slice(Math.max(0, at - half), at + half + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

// Value of a curve at x, between its points.
function valueAt({ x, mean }, at) {
  const next = x.findIndex((one) => one >= at);
  if (next <= 0) return next < 0 ? mean.at(-1) : mean[0];
  const share = (at - x[next - 1]) / (x[next] - x[next - 1]);
  return mean[next - 1] + share * (mean[next] - mean[next - 1]);
}

// view: {by: "time" | "tokens" | null, smooth, zoom: {axis, from, to} | null}. begin: time of the first record of the run
// where several runs are drawn, whose times are then counted from there; null otherwise. tokens: the curve of all tokens
// trained so far.
export function viewed(series, { by = null, smooth = false, zoom = null }, begin = null, tokens = null) {
  let seen = series;
  if (by === "tokens" && series.axis === "train_step" && tokens?.x.length > 0)
    seen = { ...seen, x: seen.x.map((step) => valueAt(tokens, step)), axis: "tokens" };
  if (by === "time" && series.axis !== "time" && series.times.length === series.x.length && series.x.length > 0)
    seen = { ...seen, x: series.times, axis: "time", measured: series.axis === "policy_version" };
  if (begin !== null && seen.axis === "time") seen = { ...seen, x: seen.x.map((x) => x - begin), axis: "elapsed" };
  // Measurements with an error of their own are few, and are not smoothed.
  if (smooth && series.axis !== "policy_version")
    seen = { ...seen, mean: smoothed(seen.mean, Math.max(3, Math.round(seen.mean.length / 12))) };
  if (zoom !== null && zoom.axis === seen.axis) {
    const inside = seen.x.map((x) => zoom.from <= x && x <= zoom.to);
    const kept = LISTS.map((name) => [name, seen[name].filter((_, at) => inside[at])]);
    seen = { ...seen, ...Object.fromEntries(kept) };
  }
  return seen;
}
