// Processes of the run on its machine: memory, CPU, and the end of the log of a chosen one, which needs the token.
import * as api from "./api.js";
import { byId, el, setHidden, setText } from "./dom.js";
import { bytes, NOTHING, percent } from "./format.js";
import { revealSection } from "./sections.js";
import { built, Table, text } from "./table.js";

const NEEDS_TOKEN =
  "A log may contain credentials, so that it needs the token: enter it under Control, or open the page with the link that contains it.";

export class ProcessTable {
  #chosen = null; // name of the process whose log is shown
  #fail;
  #table = new Table(
    byId("process-table"),
    [
      text("process", (one) => one.name, { left: true }),
      text("process id", (one) => (one.pid === null ? "ended" : String(one.pid)), { minor: true }),
      text("memory", (one) => bytes(one.memory_bytes)),
      text("CPU", (one) => percent(one.cpu_share)),
      text("log size", (one) => bytes(one.log_bytes), { minor: true }),
      built(
        "log",
        (one) => [one.log_bytes > 0, this.#chosen === one.name],
        (one) => this.#button(one),
        { unseen: true },
      ),
    ],
    "Processes of the run on its machine, with the memory and the CPU of each and of its children",
  );
  #list = [];

  // fail(error) reports a log that could not be read.
  constructor(fail) {
    this.#fail = fail;
  }

  #button({ name, log_bytes: size }) {
    if (!(size > 0)) return NOTHING;
    const shown = this.#chosen === name;
    const choose = () => this.#choose(shown ? null : name);
    const label = `${shown ? "Hide" : "Show"} the log of ${name}`;
    return el(
      "button",
      { type: "button", class: "small", "aria-label": label, "aria-expanded": String(shown), onclick: choose },
      shown ? "Hide log" : "Show log",
    );
  }

  async #choose(name) {
    this.#chosen = name;
    setText(byId("log-text"), "");
    this.#show();
    try {
      await this.#readLog();
    } catch (error) {
      this.#fail(error);
    }
  }

  async refresh() {
    const { processes } = await api.processes();
    this.#list = processes;
    if (processes.length > 0 && byId("processes").hidden) revealSection("processes");
    this.#show();
    await this.#readLog();
  }

  #show() {
    this.#table.show(this.#list, (one) => one.name, "");
    setHidden(byId("log"), this.#chosen === null);
    setText(byId("log-title"), this.#chosen === null ? "" : `Last lines of ${this.#chosen}`);
  }

  // Keeps the view at the newest line, unless the operator has scrolled up.
  async #readLog() {
    const name = this.#chosen;
    if (name === null) return;
    const node = byId("log-text");
    let lines;
    try {
      lines = (await api.log(name)).lines.join("\n");
    } catch (error) {
      if (error.status !== 401) throw error;
      lines = NEEDS_TOKEN;
    }
    if (name !== this.#chosen) return;
    const atEnd = node.scrollTop + node.clientHeight >= node.scrollHeight - 4;
    setText(node, lines);
    if (atEnd) node.scrollTop = node.scrollHeight;
  }
}
