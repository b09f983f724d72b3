// Sections as tabs of a narrow screen (layout.css): the section of the address's anchor is shown, or the first one.
import { setAttribute } from "./dom.js";

const sections = () => [...document.querySelectorAll("main > [data-section]")].filter((node) => !node.hidden);

function show() {
  const target = document.getElementById(location.hash.slice(1))?.closest("[data-section]");
  const shown = target && !target.hidden ? target : sections()[0];
  for (const node of sections()) node.classList.toggle("shown", node === shown);
  const inside = [...document.querySelectorAll("nav a")].filter((link) =>
    shown.contains(document.querySelector(link.getAttribute("href"))),
  );
  const current = inside.find((link) => link.getAttribute("href") === location.hash) ?? inside[0];
  for (const link of document.querySelectorAll("nav a")) setAttribute(link, "aria-current", link === current || null);
}

export function startSections() {
  addEventListener("hashchange", show);
  show();
}

// Shows a section that was hidden before, with its link.
export function revealSection(id) {
  document.getElementById(id).hidden = false;
  document.querySelector(`nav a[href="#${id}"]`).hidden = false;
  show();
}

// Hides sections, and parts of sections, for which the run has no data, with their links.
export function hideSections(ids) {
  for (const id of ids) {
    document.getElementById(id).hidden = true;
    const link = document.querySelector(`nav a[href="#${id}"]`);
    if (link) link.hidden = true;
  }
  for (const pair of document.querySelectorAll(".wide-narrow")) {
    const left = [...pair.children].filter((part) => !part.hidden);
    pair.classList.toggle("one", left.length === 1);
    pair.hidden = left.length === 0;
  }
  show();
}
