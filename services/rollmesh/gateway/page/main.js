// Assembles the page: one stream of live events, a few lists that are refreshed, at most one drawing per frame.
import * as api from "./api.js";
import { Actions } from "./actions.js";
import { Curves } from "./curves.js";
import { DomainTable } from "./domains.js";
import { byId, setHidden, setText } from "./dom.js";
import { LIVE_SECTIONS, showEnd, showResult } from "./ending.js";
import { renderFacts } from "./facts.js";
import { clock, seconds, version } from "./format.js";
import { LetterTable } from "./letters.js";
import { GeneratorTable, VersionTable } from "./mesh_tables.js";
import { setSight } from "./palette.js";
import { ProcessTable } from "./processes.js";
import { QueuePanels } from "./queue.js";
import { hideSections, startSections } from "./sections.js";
import { startSettings } from "./settings.js";
import { Stream } from "./stream.js";
import { Timeline } from "./timeline.js";
import { TrajectoryTable } from "./trajectories.js";
import { Viewer } from "./viewer.js";

const CURVES_MS = 4000;
const LISTS_MS = 5000;
const LETTERS = 200;
const POLICIES = 300;
const UNKNOWN_FOLDER = "RUN_FOLDER";

class Page {
  #overview = null;
  #drawing = false;
  #looks = 0; // number of drawings, as data-looks of the document
  #actions = new Actions(() => this.#afterAction());
  #versions = new VersionTable(this.#actions);
  #viewer = new Viewer(
    (v) => this.#versions.trainStep(v),
    () => this.#overview?.train_step ?? 0,
  );
  #open = (id) => this.#viewer.open(id);
  #timeline = new Timeline(this.#open);
  #queue = new QueuePanels();
  #domains = new DomainTable();
  #curves = new Curves();
  #generators = new GeneratorTable();
  #letters = new LetterTable({ ...this.#lettersActions(), open: this.#open });
  #processes = new ProcessTable((error) => this.#complain("processes", error));
  #trajectories = new TrajectoryTable(this.#open, (error) => this.#complain("trajectories", error));
  #stream = new Stream(
    (name, data) => this.#onEvent(name, data),
    (state) => this.#onConnection(state),
  );
  #complaints = new Map();
  #folder = UNKNOWN_FOLDER;
  #viewed = false; // a run that has ended, read from its folder
  #ended = false; // the run has ended while this page was open
  #announced = {};
  #readSettings = () => {};
  #polls = [
    // Also of a hidden page: the note on the end of the run names the folder.
    { name: "about", every: LISTS_MS, hidden: true, read: () => this.#describe() },
    { name: "curves", every: CURVES_MS, read: () => this.#readCurves() },
    { name: "policies", every: LISTS_MS, read: async () => this.#versions.show(await api.policies(POLICIES)) },
    { name: "dead letters", every: LISTS_MS, read: async () => this.#letters.show(await api.deadLetters(LETTERS)) },
    { name: "trajectories", every: LISTS_MS, read: () => this.#trajectories.refresh() },
    { name: "processes", every: LISTS_MS, read: () => this.#processes.refresh() },
  ];

  // The facts show the newest goodput, and a run that has ended sends no event after which they are drawn again.
  async #readCurves() {
    await this.#curves.refresh();
    this.#drawSoon();
  }

  #lettersActions() {
    const { replay, deleteLetter, allowed } = this.#actions;
    return { replay, deleteLetter, allowed };
  }

  async start() {
    api.takeTokenOfLink();
    startSections();
    this.#readSettings = startSettings((read) => this.#attempt("configuration", read));
    if (api.isFile) this.#openFile();
    else this.#stream.start();
    for (const poll of this.#polls) this.#poll(poll);
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) return;
      this.#drawSoon();
      this.#readNow();
    });
    await this.#actions.restore();
  }

  // report.html: a snapshot and lists that are in the page itself, read once.
  #openFile() {
    const inside = ["curves", "policies", "trajectories", ...["about"].filter(api.knows)];
    this.#polls = this.#polls.filter(({ name }) => inside.includes(name));
    this.#onEvent("snapshot", api.recordedAnswer("events"));
    this.#onConnection({ state: "live" });
  }

  // Reads once the facts that do not change while the gateway runs.
  async #describe() {
    if (this.#folder !== UNKNOWN_FOLDER) return;
    const about = await api.about();
    this.#folder = about.folder;
    setText(
      byId("about"),
      `rollmesh ${about.version}; groups of ${about.group_size}, batches of ${about.groups_per_batch} groups, staleness at most ${about.max_staleness}`,
    );
  }

  #onEvent(name, data) {
    if (name === "end" && data.by === "launcher" && this.#overview !== null) this.#onEnd(data.time);
    if (name !== "snapshot" && name !== "tick") return;
    if (data.overview.result !== null && !this.#viewed) this.#view(data.overview);
    this.#readWhatChanged(this.#overview, data.overview);
    this.#overview = data.overview;
    this.#curves.bound = data.overview.staleness.bound;
    this.#timeline.apply(name, data.timeline);
    this.#drawSoon();
  }

  // The page of a run that has ended: its result, and no section of a live mesh.
  #view(overview) {
    this.#viewed = true;
    setText(byId("connection"), api.isFile ? "report" : "from the run folder");
    hideSections(LIVE_SECTIONS);
    setSight(0, overview.newest_version);
    this.#curves.bound = overview.staleness.bound;
    this.#curves.end(overview.run);
    setText(byId("staleness-note"), "Trajectories of all trained batches.");
    this.#trajectories.end();
    showResult(overview);
  }

  // The run has ended, and its gateway with it.
  #onEnd(time) {
    this.#ended = true;
    this.#curves.end(this.#overview.run);
    const again = () => {
      this.#ended = false;
      hideSections(["result"]);
      this.#stream.start();
    };
    const ended = showEnd(this.#overview, time, this.#folder, again);
    const state = ended === "finished" ? "complete" : ended;
    this.#overview = { ...this.#overview, state, waiting_for: ended === "failed" ? this.#overview.waiting_for : "" };
    this.#overview.remaining_seconds = null;
    byId("connection").dataset.state = "ended";
    setText(byId("connection"), `${ended} ${clock(time)}`);
    setHidden(byId("banner"), true);
    this.#drawSoon();
  }

  // A hidden page receives every event and draws none.
  #drawSoon() {
    if (this.#drawing || document.hidden || this.#overview === null) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      this.#draw();
    });
  }

  #draw() {
    const overview = this.#overview;
    renderFacts(overview, this.#curves.goodput);
    this.#timeline.render(overview.waiting_for);
    this.#queue.render(overview);
    this.#domains.render(overview);
    this.#generators.render(overview);
    this.#versions.note(overview);
    this.#actions.render(overview);
    this.#announce(overview);
    document.documentElement.dataset.looks = String((this.#looks += 1));
  }

  // Screen readers announce changes of state, not every number.
  #announce({ state, pinned_version: pinned, waiting_for: waitingFor }) {
    const now = { state, pinned };
    const news = [];
    if (this.#announced.state !== state)
      news.push(`The run is ${state}${state === "running" || !waitingFor ? "" : `: ${waitingFor}`}.`);
    if ((this.#announced.pinned ?? null) !== pinned)
      news.push(pinned === null ? "No version is pinned." : `Pinned at ${version(pinned)}.`);
    if (news.length > 0) setText(byId("announce"), news.join(" "));
    this.#announced = now;
  }

  #onConnection({ state, since, retryIn, why }) {
    const node = byId("connection");
    node.dataset.state = state;
    if (state === "live") setText(node, this.#viewed ? "from the run folder" : "live");
    if (state === "lost") setText(node, `disconnected since ${clock(since)}`);
    if (state === "refused") setText(node, "token required");
    const words = {
      live: "",
      lost: `Disconnected since ${clock(since)}: the data on this page is older than that. ${why ? `${why}. ` : ""}Retrying in ${seconds(retryIn)}. If the run has ended, “rollmesh view ${this.#folder}” opens it again.`,
      refused: "This run is visible only to holders of its token: enter it under Control.",
    }[state];
    setText(byId("banner"), words);
    setHidden(byId("banner"), words === "");
    if (state === "live") this.#readNow();
  }

  async #poll(poll) {
    clearTimeout(poll.timer);
    if ((poll.hidden || !document.hidden) && !poll.busy && !this.#ended) {
      poll.busy = true;
      await this.#attempt(poll.name, poll.read);
      poll.busy = false;
    }
    clearTimeout(poll.timer);
    if (!api.isFile) poll.timer = setTimeout(() => this.#poll(poll), poll.every);
  }

  // Refreshes a list immediately if an event shows that its content has changed.
  #readWhatChanged(before, now) {
    const behind = {
      policies: (look) => `${look.newest_version} ${look.pinned_version}`,
      "dead letters": (look) => look.dead_letters,
      curves: (look) => look.train_step,
    };
    for (const poll of this.#polls) {
      const sign = behind[poll.name];
      if (before !== null && sign && sign(before) !== sign(now)) this.#poll(poll);
    }
  }

  #readNow() {
    for (const poll of this.#polls) this.#poll(poll);
  }

  // Shows the error of a read until the read succeeds.
  async #attempt(name, read) {
    try {
      await read();
      this.#complaints.delete(name);
      this.#showComplaints();
    } catch (error) {
      this.#complain(name, error);
    }
  }

  #complain(name, error) {
    // A lost connection has its own banner; an error without a response status is a defect and stays visible.
    if (!("status" in error)) console.error(error);
    if (error.status === 0 || error.status === 401) return;
    this.#complaints.set(name, `${name}: ${error.message}`);
    this.#showComplaints();
  }

  #showComplaints() {
    if (byId("connection").dataset.state !== "live") return;
    const text = [...this.#complaints.values()].join("; ");
    setText(byId("banner"), text);
    setHidden(byId("banner"), text === "");
  }

  #afterAction() {
    this.#versions.render();
    this.#letters.render();
    this.#readNow();
    this.#readSettings();
    // The stream that was rejected is requested again with the new token.
    if (byId("connection").dataset.state === "refused" && api.token()) this.#stream.start();
  }
}

new Page().start();
