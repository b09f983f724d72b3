// Selection of curves, and their regular refresh.
import * as api from "./api.js";
import { byId, el, setHidden } from "./dom.js";
import { number, percent, seconds, short, words } from "./format.js";
import { Chart } from "./chart.js";
import { viewed } from "./curve_view.js";
import { tickText } from "./ticks.js";

const POINTS = 180;
const ZOOMED_POINTS = 600;
const FIRST_REPORT = "the first train step";

const step = (title, ...names) => ({ title, names, waitsFor: FIRST_REPORT });
const SHOWN = [
  step("Reward", "reward_mean"),
  { title: "Evaluation", names: ["evaluation"], waitsFor: "the first evaluation" },
  step("Response length", "response_length_mean"),
  { title: "Saved tokens per second", names: ["tokens_per_second"], waitsFor: "the first rollouts" },
  step("Staleness", "staleness_mean"),
  step("Loss", "loss"),
  step("Gradient norm", "grad_norm"),
  step("Entropy", "entropy"),
  step("KL(behavior || policy)", "kl_behavior"),
  step("Off-policy tokens", "off_policy_token_share"),
  step("Time per phase", "trainer_wait", "seconds_gradient", "seconds_evidence", "seconds_update"),
];
const FIRST_CHOICE = "goodput";
const LABELS = {
  goodput: "goodput (trained / generated tokens)",
  kl_behavior: "KL(behavior || policy)",
  logprob_gap: "logprob gap",
  trainer_wait: "trainer wait",
  seconds_gradient: "gradient",
  seconds_evidence: "old logprobs",
  seconds_update: "optimizer",
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

const byName = (series) =>
  new Map(series.map((one) => [one.name, { ...one, label: words(LABELS[one.name] ?? one.name) }]));

export class Curves {
  #charts;
  #choice = el("select", { "aria-label": "Curve" });
  #available = "";
  #found = new Map(); // newest answer, by name
  #beside = null; // {run, begin, found} of a second run
  #begin = null; // time of the first record of the run, if there is a second one
  #run = "this run";
  #view = { byTime: false, smooth: false, zoom: null };
  #ended = false;
  goodput = null; // newest value, for the facts of the run

  constructor() {
    const chart = (options) => new Chart({ ...options, format: number, zoom: (range) => this.#zoomTo(range) });
    this.#charts = SHOWN.map((shown) => ({ ...shown, chart: chart(shown) }));
    this.#charts.push({
      names: null,
      chart: chart({ title: "Chosen curve", waitsFor: FIRST_REPORT, select: this.#choice }),
    });
    byId("curve-grid").append(...this.#charts.map((one) => one.chart.node));
    this.#choice.addEventListener("change", () => this.refresh());
    byId("curves-reset").addEventListener("click", () => this.#zoomTo(null));
    this.#listen("curves-smooth", "smooth");
    this.#listen("curves-time", "byTime");
    this.#offer([FIRST_CHOICE]);
  }

  // A run that has ended has no "now" at the right end of its curves, and waits for no further curve.
  end(run) {
    this.#ended = true;
    this.#run = run;
    this.#show(); // curves that arrived before
  }

  #listen(id, field) {
    byId(id).addEventListener("click", () => {
      const on = !this.#view[field];
      const zoom = field === "byTime" ? null : this.#view.zoom;
      this.#view = { ...this.#view, [field]: on, zoom };
      byId(id).setAttribute("aria-pressed", String(on));
      setHidden(byId("curves-reset"), zoom === null);
      this.#show();
    });
  }

  // range: {axis, from, to}; null shows everything. All curves with the same axis follow.
  #zoomTo(range) {
    this.#view = { ...this.#view, zoom: range };
    setHidden(byId("curves-reset"), range === null);
    this.#show();
    this.refresh().catch(() => {}); // with more points; the regular refresh reports errors
  }

  async refresh() {
    const choice = this.#choice.value || FIRST_CHOICE;
    const names = [...new Set([...SHOWN.flatMap((shown) => shown.names), FIRST_CHOICE, choice])];
    const answer = await api.series(names, this.#view.zoom ? ZOOMED_POINTS : POINTS);
    this.#found = byName(answer.series);
    this.#begin = answer.begin_time;
    if (answer.beside !== null) {
      const { run, begin_time: begin, series } = answer.beside;
      this.#beside = { run, begin, found: byName(series) };
    }
    this.#offer(answer.available);
    this.#show();
    this.goodput = this.#found.get(FIRST_CHOICE)?.mean.at(-1) ?? null;
  }

  #show() {
    for (const { names: own, chart } of this.#charts) {
      const series = this.#seriesOf(own ?? [this.#choice.value]);
      if (series.length === 0) continue;
      chart.show(series, formatOf(series[0]), this.#ended ? "end" : "now");
      setHidden(chart.node, this.#ended && own !== null && series.every((one) => one.x.length === 0));
    }
  }

  // The curves of the run, then those of the run beside, as they are looked at.
  #seriesOf(names) {
    const own = { run: this.#run, begin: this.#begin, found: this.#found };
    const runs = this.#beside === null ? [own] : [own, this.#beside];
    return runs.flatMap(({ run, begin, found }, second) => {
      const known = names.map((name) => found.get(name)).filter(Boolean);
      return known.map((one, at) => ({
        ...viewed(one, this.#view, runs.length > 1 ? begin : null),
        id: second ? `beside ${one.name}` : one.name,
        label: runs.length === 1 ? one.label : known.length === 1 ? run : `${one.label}, ${run}`,
        colour: second * known.length + at,
      }));
    });
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
