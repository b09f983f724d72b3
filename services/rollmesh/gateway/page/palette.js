// Colours of policy versions: a sequential ramp from the oldest to the newest version in sight. No colour repeats. In a
// long ramp every other version is moved to the middle of its contrasts, so that neighbours differ.
import { el } from "./dom.js";
import { version } from "./format.js";

const STOPS = 6;
const LONG = 16; // versions of a ramp whose neighbours look alike
const MOVED = 0.4;

const parsed = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const hexOf = (rgb) => `#${rgb.map((part) => Math.round(part).toString(16).padStart(2, "0")).join("")}`;

const between = (one, other, share) => one.map((part, i) => part + (other[i] - part) * share);

// Colour at a share 0..1 of the ramp.
function mixed(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return between(stops[low], stops[low + 1], at - low);
}

// Colours for the canvas; read again when the theme changes.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    stops: Array.from({ length: STOPS }, (_, at) => parsed(read(`--ramp${at}`))),
    ink: read("--ink"),
    soft: read("--soft"),
    line: read("--line"),
    surface: read("--surface"),
    track: read("--track"),
    accent: read("--accent"),
  };
}

let colours = null;
const listeners = new Set();

export function currentColours() {
  colours ??= readColours();
  return colours;
}

export const onColours = (listener) => listeners.add(listener);

function announce() {
  for (const listener of listeners) listener();
}

// A ramp over a range of versions; versions outside of it have the colour of its end.
export class Ramp {
  constructor(low, high) {
    this.low = low;
    this.high = Math.max(low, high);
  }

  colour(policyVersion) {
    const share = this.high > this.low ? (policyVersion - this.low) / (this.high - this.low) : 1;
    const { stops, surface, ink } = currentColours();
    const colour = mixed(stops, share);
    if (this.high - this.low <= LONG || (this.high - policyVersion) % 2 === 0) return hexOf(colour);
    return hexOf(between(colour, parsed(share < 0.5 ? ink : surface), MOVED));
  }
}

let sight = new Ramp(0, 0);

export const inSight = () => sight;

// Sets the range of versions in sight of the whole page.
export function setSight(low, high) {
  if (sight.low === low && sight.high === high) return;
  sight = new Ramp(low, high);
  announce();
}

// Gives a node, and what it contains, the colour of a version.
export function shade(node, policyVersion, ramp = sight) {
  if (policyVersion >= 0) node.style.setProperty("--shade", ramp.colour(policyVersion));
  return node;
}

// Label of a version: a swatch and its name, so that colour is never the only cue.
export const versionTag = (policyVersion) =>
  shade(el("span", { class: "version" }, version(policyVersion)), policyVersion);

// Changes when the colour of a version changes: for cells that are rebuilt only then.
export const colourSign = (policyVersion) => `${policyVersion} ${sight.colour(policyVersion)}`;

document.documentElement.addEventListener("themechange", () => {
  colours = null;
  announce();
});
