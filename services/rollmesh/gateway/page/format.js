// Numbers as text, with units. An unknown value is a dash, never a zero.

export const NOTHING = "\u2013";

const known = (value) => typeof value === "number" && Number.isFinite(value);
const formats = new Map();

function fixed(digits) {
  if (!formats.has(digits)) {
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    formats.set(digits, new Intl.NumberFormat("en", options));
  }
  return formats.get(digits);
}

export const count = (value) => (known(value) ? fixed(0).format(value) : NOTHING);

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

// 12,345 is unchanged; from 100,000 on 123k, 1.23M, 4.56G.
export function short(value) {
  if (!known(value)) return NOTHING;
  for (const [size, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(value) >= (letter === "k" ? 1e5 : size)) {
      const scaled = value / size;
      return fixed(Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2).format(scaled) + letter;
    }
  }
  return Number.isInteger(value) || Math.abs(value) >= 1000 ? fixed(0).format(value) : number(value);
}

// Three significant digits for a measured value of any size.
export function number(value) {
  if (!known(value)) return NOTHING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5) return short(value);
  if (size >= 100) return fixed(0).format(value);
  if (size >= 10) return fixed(1).format(value);
  if (size >= 0.01) return fixed(size >= 1 ? 2 : 3).format(value);
  return value.toExponential(1);
}

export const percent = (share) =>
  known(share) ? `${fixed(share !== 0 && Math.abs(share) < 0.1 ? 1 : 0).format(100 * share)}%` : NOTHING;

export function bytes(value) {
  if (!known(value)) return NOTHING;
  for (const [size, unit] of [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ]) {
    if (value >= size) return `${fixed(value / size >= 100 ? 0 : 1).format(value / size)} ${unit}`;
  }
  return `${fixed(0).format(value)} B`;
}

export function seconds(value) {
  if (!known(value)) return NOTHING;
  if (value < 10) return `${fixed(1).format(value)} s`;
  if (value < 120) return `${fixed(0).format(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

// Unix seconds as local clock time, with the day unless it is today.
export function clock(time) {
  if (!known(time)) return NOTHING;
  const when = new Date(1000 * time);
  const options = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  if (when.toDateString() !== new Date().toDateString()) Object.assign(options, { month: "short", day: "numeric" });
  return when.toLocaleString("en-GB", options);
}

export const version = (value) => (known(value) && value >= 0 ? `v${value}` : "none");

export const words = (name) => String(name).replaceAll("_", " ");
