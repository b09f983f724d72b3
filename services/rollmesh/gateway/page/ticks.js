// Round numbers for axes.

// Ascending ticks inside [low, high], about `wanted` of them, at multiples of 1, 2 or 5 times a power of ten.
export function ticks(low, high, wanted, { integer = false } = {}) {
  const length = high - low;
  if (!(length > 0)) return [low];
  const rough = length / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough * 0.999);
  if (integer) step = Math.max(1, Math.round(step));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1)
    found.push(Number((n * step).toPrecision(12)));
  return found;
}

// Value of a tick, with enough decimals to distinguish it from its neighbours.
export function tickText(value, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Range of whole decades around the positive values, for a logarithmic axis.
export function decades(values) {
  const logs = values.filter((value) => value > 0 && Number.isFinite(value)).map(Math.log10);
  if (logs.length === 0) return { low: 0.1, high: 1 };
  const least = Math.floor(Math.min(...logs));
  return { low: 10 ** least, high: 10 ** Math.max(Math.ceil(Math.max(...logs)), least + 1) };
}

// Vertical range of a curve: from 0 if the values are close enough to it, with a margin.
export function valueRange(lows, highs) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of lows) if (Number.isFinite(value)) low = Math.min(low, value);
  for (const value of highs) if (Number.isFinite(value)) high = Math.max(high, value);
  if (low > high) return { low: 0, high: 1 };
  if (low >= 0 && low < high * 0.6) low = 0;
  if (low === high)
    return low === 0 ? { low: 0, high: 1 } : { low: low - Math.abs(low) * 0.1, high: high + Math.abs(high) * 0.1 };
  const air = (high - low) * 0.06;
  return { low: low === 0 ? 0 : low - air, high: high + air };
}
