// Calls of the REST API. The token is stored only in this tab's session storage; a link may bring it (`?token=`).

const BASE = "api/v1/";
const TOKEN = "rollmesh.token";
const TIMEOUT_MS = 15000;

// report.html has the answers of the API inside, by path, and no gateway (report/report_file.py).
const answers = JSON.parse(document.getElementById("recorded")?.textContent ?? "null");
export const isFile = answers !== null;
export const knows = (path) => !isFile || path in answers;
export const recordedAnswer = (path) => answers[path];

export class ApiFailure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function token() {
  try {
    return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return "";
  }
}

export function setToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

// Stores the token of the link that opened the page, and removes it from the address bar and the history.
export function takeTokenOfLink() {
  const url = new URL(location.href);
  const given = url.searchParams.get("token");
  if (given === null) return;
  url.searchParams.delete("token");
  history.replaceState(null, "", url);
  try {
    setToken(given);
  } catch {
    // storage is disabled: the token has to be entered under Control
  }
}

export const address = (path, query = {}) => {
  const url = new URL(BASE + path, document.baseURI);
  for (const [name, value] of Object.entries(query))
    if (value !== null && value !== "") url.searchParams.set(name, value);
  return url;
};

export function headers(extra = {}) {
  const given = token();
  return given ? { ...extra, Authorization: `Bearer ${given}` } : extra;
}

// Error of a response with a status of 400 or more, with its message on one line.
export async function failureOf(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // not a response of the gateway (a proxy, a page): only the status is known
  }
  const text =
    typeof body.error === "string" ? body.error : `the gateway answered ${response.status} ${response.statusText}`;
  const where = body.field && body.field !== "Authorization" ? ` (${body.field})` : "";
  return new ApiFailure(text + where + (body.hint ? `: ${body.hint}` : ""), response.status);
}

function recorded(path) {
  if (path in answers) return answers[path];
  throw new ApiFailure(`report.html has no ${path}: rollmesh view ${answers.about?.folder ?? "RUN_FOLDER"} shows it`, 404);
}

async function call(method, path, { query, body } = {}) {
  if (isFile) return recorded(path);
  let response;
  try {
    response = await fetch(address(path, query), {
      method,
      headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(TIMEOUT_MS),
      cache: "no-store",
    });
  } catch (error) {
    const why = error.name === "TimeoutError" ? `did not answer within ${TIMEOUT_MS / 1000} s` : "is unreachable";
    throw new ApiFailure(`the gateway ${why}`);
  }
  if (!response.ok) throw await failureOf(response);
  return response.json();
}

const id = encodeURIComponent;

export const about = () => call("GET", "about");
export const series = (names, points) => call("GET", "series", { query: { names: names.join(","), points } });
export const trajectories = (query) => call("GET", "trajectories", { query });
export const trajectory = (trajectoryId, first, limit) =>
  call("GET", `trajectories/${id(trajectoryId)}`, { query: { first_token: first, token_limit: limit } });
export const batches = () => call("GET", "batches");
export async function batch(trainStep, { order, descending, first, limit }) {
  const page = await call("GET", `batches/${trainStep}`, { query: { order, descending, first, limit } });
  if (!isFile) return page;
  const sign = descending ? -1 : 1;
  const rows = order === "batch" ? [...page.items] : [...page.items].sort((a, b) => sign * (a[order] - b[order]));
  return { ...page, items: rows.slice(first, first + limit), first, total: page.items.length };
}
export const settings = () => call("GET", "config");
export const processes = () => call("GET", "processes");
export const log = (name) => call("GET", `logs/${id(name)}`);
export const policies = (limit) => call("GET", "policies", { query: { limit } });
export const deadLetters = (limit) => call("GET", "dead-letters", { query: { limit } });

export const checkToken = () => call("GET", "token");
export const pause = () => call("POST", "pause");
export const resume = () => call("POST", "resume");
export const pin = (policyVersion) => call("POST", `policies/${policyVersion}/pin`);
export const unpin = () => call("POST", "unpin");
export const rollBack = (policyVersion) => call("POST", `policies/${policyVersion}/rollback`);
export const replay = (trajectoryId) => call("POST", `dead-letters/${id(trajectoryId)}/replay`);
export const deleteLetter = (trajectoryId) => call("DELETE", `dead-letters/${id(trajectoryId)}`);
export const scale = (service, replicas, force) => call("POST", "scale", { body: { service, replicas, force } });
