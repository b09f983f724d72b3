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
const ended = (title, ...names) => ({ title, names, waitsFor: "", ofEnded: true }); // only a run folder has these
const SHOWN = [
  step("Reward", "reward_mean", "outcome_mean"),
  { title: "Evaluation", names: ["evaluation"], waitsFor: "the first evaluation" },
  step("Response length", "response_length_mean", "response_length_p90"),
  step("Truncated responses", "truncated_share"),
  { title: "Saved tokens per second", names: ["tokens_per_second"], waitsFor: "the first rollouts" },
  ended("Tokens per second", "generated_tokens_per_second", "trained_tokens_per_second"),
  { ...step("Staleness", "staleness_mean", "staleness_max"), bounded: true },
  step("Off-policy correction", "off_policy_token_share", "effective_sample_share"),
  step("Clipped or truncated tokens", "clipped_share"),
  step("Loss", "loss"),
  step("Gradient norm", "grad_norm"),
  step("Entropy", "entropy"),
  step("KL(behavior || policy)", "kl_behavior"),
  { ...step("Largest engine gap", "logprob_gap_max"), log: true },
  step("Time per phase", "trainer_wait", "seconds_gradient", "seconds_evidence", "seconds_update"),
  ended("Life of a version", "version_announced", "version_first_served", "version_last_served"),
];
const FIRST_CHOICE = "goodput";
const LABELS = {
  goodput: "goodput (trained / generated tokens)",
  kl_behavior: "KL(behavior || policy)",
  reverse_kl: "KL(behavior || teacher)",
  forward_kl: "KL(teacher || policy)",
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
  reward_mean: "shaped reward",
  outcome_mean: "outcome",
  response_length_mean: "mean",
  response_length_p90: "90th percentile",
  generated_tokens_per_second: "generated",
  trained_tokens_per_second: "trained",
  staleness_mean: "mean",
  staleness_max: "largest",
  off_policy_token_share: "off-policy tokens",
  effective_sample_share: "effective sample size",
  version_announced: "announced",
  version_first_served: "first generator serves",
  version_last_served: "last generator serves",
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
  #beside = []; // {run, begin, found} of other runs
  #begin = null; // time of the first record of the run, if there are others
  #run = "this run";
  #view = { by: null, smooth: false, zoom: null };
  #ended = false;
  goodput = null; // newest value, for the facts of the run
  bound = null; // largest staleness allowed

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
    byId("curves-smooth").addEventListener("click", () => this.#look({ smooth: !this.#view.smooth }));
    for (const by of ["time", "tokens"])
      byId(`curves-${by}`).addEventListener("click", () => this.#look({ by: this.#view.by === by ? null : by, zoom: null }));
    this.#offer([FIRST_CHOICE]);
  }

  // A run that has ended has no "now" at the right end of its curves, and waits for no further curve.
  end(run) {
    this.#ended = true;
    this.#run = run;
    this.#show(); // curves that arrived before
  }

  #look(change) {
    this.#view = { ...this.#view, ...change };
    byId("curves-smooth").setAttribute("aria-pressed", String(this.#view.smooth));
    for (const by of ["time", "tokens"]) byId(`curves-${by}`).setAttribute("aria-pressed", String(this.#view.by === by));
    setHidden(byId("curves-reset"), this.#view.zoom === null);
    this.#show();
  }

  // range: {axis, from, to}; null shows everything. All curves with the same axis follow.
  #zoomTo(range) {
    this.#look({ zoom: range });
    this.refresh().catch(() => {}); // with more points; the regular refresh reports errors
  }

  async refresh() {
    const choice = this.#choice.value || FIRST_CHOICE;
    const shown = SHOWN.filter((one) => this.#ended || !one.ofEnded).flatMap((one) => one.names);
    const names = [...new Set([...shown, FIRST_CHOICE, "trained_token_total", choice])];
    const answer = await api.series(names, this.#view.zoom ? ZOOMED_POINTS : POINTS);
    this.#found = byName(answer.series);
    this.#begin = answer.begin_time;
    this.#beside = answer.beside.map(({ run, begin_time: begin, series }) => ({ run, begin, found: byName(series) }));
    this.#offer(answer.available);
    this.#show();
    this.goodput = this.#found.get(FIRST_CHOICE)?.mean.at(-1) ?? null;
  }

  #show() {
    for (const { names: own, chart, bounded, ofEnded } of this.#charts) {
      const series = this.#seriesOf(own ?? [this.#choice.value]);
      if (series.length === 0) continue;
      chart.show(series, formatOf(series[0]), this.#ended ? "end" : "now", bounded ? this.bound : null);
      const unknown = own !== null && series.every((one) => one.x.length === 0);
      setHidden(chart.node, unknown && (this.#ended || ofEnded));
    }
  }

  // The curves of the run, then those of the run beside, as they are looked at.
  #seriesOf(names) {
    const own = { run: this.#run, begin: this.#begin, found: this.#found };
    const runs = [own, ...this.#beside];
    return runs.flatMap(({ run, begin, found }, place) => {
      const known = names.map((name) => found.get(name)).filter(Boolean);
      return known.map((one, at) => ({
        ...viewed(one, this.#view, runs.length > 1 ? begin : null, found.get("trained_token_total")),
        id: place ? `beside ${place} ${one.name}` : one.name,
        label: runs.length === 1 ? one.label : known.length === 1 ? run : `${one.label}, ${run}`,
        colour: place * known.length + at,
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
