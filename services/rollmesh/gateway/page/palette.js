// Colours of policy versions: version n has slot n mod 8, on the canvas and in the document.
import { el } from "./dom.js";
import { version } from "./format.js";

export const SLOTS = 8;

export const slot = (policyVersion) => ((policyVersion % SLOTS) + SLOTS) % SLOTS;

export const slotClass = (policyVersion) => (policyVersion >= 0 ? `s${slot(policyVersion)}` : "");

// Label of a version: a swatch and its name, so that colour is never the only cue.
export const versionTag = (policyVersion) =>
  el("span", { class: `version ${slotClass(policyVersion)}` }, version(policyVersion));

// Colours for the canvas; read again when the theme changes.
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    versions: Array.from({ length: SLOTS }, (_, at) => read(`--v${at}`)),
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

document.documentElement.addEventListener("themechange", () => {
  colours = null;
  for (const listener of listeners) listener();
});
