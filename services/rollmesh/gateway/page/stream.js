// Server-sent events over fetch (EventSource cannot send a token), with reconnection and back-off.
import { address, failureOf, headers } from "./api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
const SILENCE_MS = 20000; // a stream without data for this long is dead, even if the TCP connection is open

// Splits a text stream into events {name, id, data}; returns the incomplete rest.
export function parseEvents(buffer, emit) {
  let rest = buffer;
  for (;;) {
    const end = rest.indexOf("\n\n");
    if (end < 0) return rest;
    const event = { name: "message", id: null, data: [] };
    for (const line of rest.slice(0, end).split("\n")) {
      const colon = line.indexOf(":");
      if (colon <= 0) continue; // a comment keeps the connection alive
      const value = line.slice(colon + 1).replace(/^ /, "");
      if (line.startsWith("event:")) event.name = value;
      else if (line.startsWith("id:")) event.id = value;
      else if (line.startsWith("data:")) event.data.push(value);
    }
    rest = rest.slice(end + 2);
    if (event.data.length > 0) emit({ ...event, data: event.data.join("\n") });
  }
}

export class Stream {
  #onEvent;
  #onState;
  #lastId = null;
  #failures = 0;
  #stop = null;
  #timer = 0;
  #lostAt = null;
  #ended = false;

  // After an end event the stream does not connect again by itself. onEvent(name, data); onState({state: "live" | "lost" | "refused", since, retryIn, why})
  constructor(onEvent, onState) {
    this.#onEvent = onEvent;
    this.#onState = onState;
  }

  start() {
    this.stop();
    this.#ended = false;
    this.#run();
  }

  stop() {
    clearTimeout(this.#timer);
    this.#stop?.abort();
    this.#stop = null;
  }

  async #run() {
    const control = new AbortController();
    this.#stop = control;
    let failure;
    try {
      await this.#read(control);
      failure = new Error("the gateway ended the stream");
    } catch (error) {
      failure = error;
    }
    if (this.#stop !== control) return; // stopped or restarted in the meantime
    if (this.#ended) return;
    this.#lostAt ??= Date.now();
    const refused = failure.status === 401;
    const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.#failures) * (0.75 + 0.5 * Math.random());
    this.#failures = Math.min(this.#failures + 1, 10);
    const why = failure.status ? failure.message : "";
    this.#onState({ state: refused ? "refused" : "lost", since: this.#lostAt / 1000, retryIn: wait / 1000, why });
    if (!refused) this.#timer = setTimeout(() => this.#run(), wait);
  }

  async #read(control) {
    const extra = this.#lastId === null ? {} : { "Last-Event-ID": this.#lastId };
    let silence = setTimeout(() => control.abort(), SILENCE_MS);
    try {
      const options = { headers: headers(extra), signal: control.signal, cache: "no-store" };
      const response = await fetch(address("events"), options);
      if (!response.ok) throw await failureOf(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "";
      for (;;) {
        const { done, value } = await reader.read();
        clearTimeout(silence);
        if (done) return;
        silence = setTimeout(() => control.abort(), SILENCE_MS);
        buffer = parseEvents(buffer + value, (event) => this.#deliver(event));
      }
    } finally {
      clearTimeout(silence);
    }
  }

  #deliver(event) {
    const data = JSON.parse(event.data);
    if (event.id !== null) this.#lastId = event.id;
    if (this.#lostAt !== null || this.#failures > 0 || event.name === "snapshot") {
      this.#lostAt = null;
      this.#failures = 0;
      this.#onState({ state: "live" });
    }
    this.#ended = event.name === "end" && data.by === "launcher";
    this.#onEvent(event.name, data);
  }
}
