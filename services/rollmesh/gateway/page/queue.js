// Three small charts of the queue: states, staleness, and drops and waste.
import { byId } from "./dom.js";
import { count, plural, short, words } from "./format.js";
import { Bars } from "./bars.js";

const STATES = ["pending", "leased", "partial", "resting", "finished", "scored", "unscorable", "dead", "surplus"];
const GROUPS = ["open", "ready", "cut", "aside"];
const MOST_BINS = 14;

export class QueuePanels {
  #queue = new Bars(byId("queue-bars"), { heads: ["state", "count"], caption: "Trajectories and groups by state" });
  #staleness = new Bars(byId("staleness-bars"), {
    heads: ["train steps", "waiting", "trained"],
    caption: "Staleness of waiting groups and of trajectories of the newest trained batch",
  });
  #drops = new Bars(byId("drop-bars"), {
    heads: ["reason", "number"],
    caption: "Groups dropped untrained, groups that began again, and members without a score or cut off, by reason",
  });

  render(overview) {
    this.#renderQueue(overview);
    this.#renderStaleness(overview.staleness);
    this.#renderDrops(overview.drops, overview.waste);
  }

  #renderQueue({ trajectories, groups, waiting_for: waitingFor }) {
    const rows = [];
    for (const [kind, names, counts] of [
      ["", STATES, trajectories],
      ["groups ", GROUPS, groups],
    ]) {
      const most = Math.max(1, ...Object.values(counts));
      for (const name of names) {
        const n = counts[name] ?? 0;
        rows.push({ key: kind + name, label: kind + name, values: [{ share: n / most, text: count(n) }] });
      }
    }
    const any = [...Object.values(trajectories), ...Object.values(groups)].some((n) => n > 0);
    this.#queue.show(any ? rows : [], `The queue is empty${waitingFor ? `: waiting for ${waitingFor}` : ""}.`);
  }

  #renderStaleness({ bound, queue, trained }) {
    const bins = new Map();
    const binOf = (staleness) => {
      // All larger values share the last bar, so that a large bound does not make a long list.
      const at = Math.min(staleness, MOST_BINS);
      if (!bins.has(at)) bins.set(at, { waiting: 0, trained: 0 });
      return bins.get(at);
    };
    for (const { staleness, count: n } of queue) binOf(staleness).waiting += n;
    for (const { staleness, count: n } of trained) binOf(staleness).trained += n;
    if (bins.size > 0) for (let at = 0; at <= Math.min(bound, MOST_BINS); at += 1) binOf(at);
    const most = (name) => Math.max(1, ...[...bins.values()].map((bin) => bin[name]));
    const [mostWaiting, mostTrained] = [most("waiting"), most("trained")];
    const rows = [...bins]
      .sort((a, b) => a[0] - b[0])
      .map(([at, bin]) => ({
        key: at,
        label: `${at}${at === MOST_BINS ? " or more" : ""}${at === bound ? " (bound)" : at > bound ? " (over)" : ""}`,
        over: at > bound,
        values: [
          { share: bin.waiting / mostWaiting, text: count(bin.waiting) },
          { share: bin.trained / mostTrained, text: count(bin.trained) },
        ],
      }));
    this.#staleness.show(rows, "Nothing yet: waiting for the first tokens.");
  }

  // Dropped groups first, then groups that began again and members without a score or cut off.
  #renderDrops(drops, waste) {
    const dropped = drops.map((drop) => ({ reason: drop.reason, n: drop.groups, tokens: drop.tokens }));
    const wasted = waste.map((one) => ({ reason: one.reason, n: one.count, tokens: one.tokens }));
    const byNumber = (all) => all.filter((one) => one.n > 0).sort((a, b) => b.n - a.n);
    const shown = [...byNumber(dropped), ...byNumber(wasted)];
    const most = Math.max(1, ...shown.map((one) => one.n));
    const rows = shown.map(({ reason, n, tokens }) => ({
      key: reason,
      label: words(reason),
      values: [
        { share: n / most, text: `${count(n)} (${plural(tokens, "token").replace(count(tokens), short(tokens))})` },
      ],
    }));
    this.#drops.show(rows, "No group has been dropped, and no tokens were wasted.");
  }
}
