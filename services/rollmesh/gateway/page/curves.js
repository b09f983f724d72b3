// Selection of curves, and their regular refresh.
import * as api from "./api.js";
import { byId, el } from "./dom.js";
import { number, percent, seconds, short, words } from "./format.js";
import { Chart } from "./chart.js";
import { tickText } from "./ticks.js";

const POINTS = 180;
const FIRST_REPORT = "the first train step";

const SHOWN = [
  { title: "Reward", names: ["reward_mean"], waitsFor: FIRST_REPORT },
  { title: "Evaluation", names: ["evaluation"], waitsFor: "the first evaluation" },
  { title: "Response length", names: ["response_length_mean"], waitsFor: FIRST_REPORT },
  { title: "Saved tokens per second", names: ["tokens_per_second"], waitsFor: "the first rollouts" },
  { title: "Staleness", names: ["staleness_mean"], waitsFor: FIRST_REPORT },
];
const FIRST_CHOICE = "goodput";
const LABELS = {
  goodput: "goodput (trained / generated tokens)",
  kl_behavior: "KL(behavior || policy)",
  logprob_gap: "logprob gap",
  trainer_wait: "trainer waits for a batch",
  tokens_per_second: "saved tokens per second",
  finished_per_second: "finished trajectories per second",
  memory_ratio: "queue memory",
  ratio_mean: "importance ratio",
  in_flight: "rollouts in flight",
};

// Format of a curve's values; with an axis step the value is a tick, without the unit.
function formatOf({ name, unit }) {
  if (unit === "ratio" && name !== "ratio_mean") {
    return (value, step = 0) => (step > 0 ? `${tickText(100 * value, 100 * step)}%` : percent(value));
  }
  if (unit === "seconds") return (value, step = 0) => (step > 0 ? tickText(value, step) : seconds(value));
  const named = ["reward", "score", "loss", "norm", "rate", "ratio"].includes(unit) ? "" : ` ${unit}`;
  const write = unit === "tokens" || unit.endsWith("/s") ? short : number;
  return (value, step = 0) => {
    if (step > 0) return Math.abs(value) < 1e5 && step >= 1e-4 ? tickText(value, step) : write(value);
    return write(Math.abs(value) >= 100 ? Math.round(value) : value) + named;
  };
}

export class Curves {
  #charts;
  #choice = el("select", { "aria-label": "Curve" });
  #available = "";
  goodput = null; // newest value, for the facts of the run

  constructor() {
    this.#charts = SHOWN.map((shown) => ({
      ...shown,
      chart: new Chart({ title: shown.title, waitsFor: shown.waitsFor, format: number }),
    }));
    const chosen = new Chart({ title: "Chosen curve", waitsFor: FIRST_REPORT, format: number, select: this.#choice });
    this.#charts.push({ names: null, chart: chosen });
    byId("curve-grid").append(...this.#charts.map(({ chart }) => chart.node));
    this.#choice.addEventListener("change", () => this.refresh());
    this.#offer([FIRST_CHOICE]);
  }

  async refresh() {
    const choice = this.#choice.value || FIRST_CHOICE;
    const names = [...new Set([...SHOWN.flatMap((shown) => shown.names), FIRST_CHOICE, choice])];
    const answer = await api.series(names, POINTS);
    const found = new Map(
      answer.series.map((one) => [one.name, { ...one, label: words(LABELS[one.name] ?? one.name) }]),
    );
    this.#offer(answer.available);
    for (const { names: own, chart } of this.#charts) {
      const series = (own ?? [this.#choice.value]).map((name) => found.get(name)).filter(Boolean);
      if (series.length > 0) chart.show(series, formatOf(series[0]));
    }
    this.goodput = found.get(FIRST_CHOICE)?.mean.at(-1) ?? null;
  }

  #offer(names) {
    if (this.#available === String(names)) return;
    this.#available = String(names);
    const before = this.#choice.value || FIRST_CHOICE;
    const shown = new Set(SHOWN.flatMap((one) => one.names));
    const left = names.filter((name) => !shown.has(name));
    this.#choice.replaceChildren(...left.map((name) => el("option", { value: name }, words(LABELS[name] ?? name))));
    this.#choice.value = left.includes(before) ? before : (left[0] ?? "");
  }
}
