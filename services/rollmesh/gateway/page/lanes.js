// Packs rollouts into lanes: a rollout takes the lowest free lane at its start, and keeps it.

export class Lanes {
  #spans = new Map();
  #laneOf = new Map();
  #free = 0; // every lane below is taken
  rows = []; // lane -> spans by start

  get size() {
    return this.#spans.size;
  }

  get(id) {
    return this.#spans.get(id);
  }

  laneOf(id) {
    return this.#laneOf.get(id) ?? -1;
  }

  values() {
    return this.#spans.values();
  }

  // Starts over with a complete timeline.
  reset(spans) {
    this.#spans.clear();
    this.#laneOf.clear();
    this.#free = 0;
    this.rows = [];
    for (const span of [...spans].sort((a, b) => a.start - b.start)) this.#place(span);
  }

  // Applies one poll: changed spans, and ids that have left the window.
  apply(changed, removed) {
    for (const id of removed) this.#remove(id);
    const fresh = [];
    for (const span of changed) {
      const old = this.#spans.get(span.id);
      // Leased again after a pause: another rollout may have taken its lane.
      if (old && old.end !== null && span.end === null) this.#remove(span.id);
      if (this.#spans.has(span.id)) this.#replace(span);
      else fresh.push(span);
    }
    fresh.sort((a, b) => a.start - b.start);
    for (const span of fresh) this.#place(span);
  }

  #replace(span) {
    const lane = this.#laneOf.get(span.id);
    const row = this.rows[lane];
    row[row.indexOf(this.#spans.get(span.id))] = span;
    this.#spans.set(span.id, span);
    if (span.end !== null) this.#free = Math.min(this.#free, lane);
  }

  #place(span) {
    let lane = this.#free;
    while (lane < this.rows.length && !this.#isFree(lane, span.start)) lane += 1;
    if (lane === this.rows.length) this.rows.push([]);
    // Skipped lanes are in progress, or end after this start; only the former are certainly taken.
    while (this.#free < lane && this.#isBusy(this.#free)) this.#free += 1;
    this.rows[lane].push(span);
    this.#spans.set(span.id, span);
    this.#laneOf.set(span.id, lane);
  }

  #isBusy(lane) {
    const row = this.rows[lane];
    return row.length > 0 && row[row.length - 1].end === null;
  }

  #isFree(lane, start) {
    const row = this.rows[lane];
    if (row.length === 0) return true;
    const { end } = row[row.length - 1];
    return end !== null && end <= start;
  }

  #remove(id) {
    const lane = this.#laneOf.get(id);
    if (lane === undefined) return;
    const span = this.#spans.get(id);
    this.rows[lane].splice(this.rows[lane].indexOf(span), 1);
    this.#spans.delete(id);
    this.#laneOf.delete(id);
    this.#free = Math.min(this.#free, lane);
    while (this.rows.length > 0 && this.rows[this.rows.length - 1].length === 0) this.rows.pop();
    this.#free = Math.min(this.#free, this.rows.length);
  }
}
