// Draws lanes of rollouts on a canvas. The cost depends on the number of pixels, not of rollouts.
import { seconds } from "./format.js";
import { inSight } from "./palette.js";

export const AXIS_HEIGHT = 20;
const SHORTEST_WINDOW_SECONDS = 15;
const LABEL_ROW_HEIGHT = 12;
const LABEL_WIDTH = 30;

// Time range of the timeline: the age of a young run, and at most the gateway's window.
export function timeRange(now, windowSeconds, oldestStart) {
  const age = Number.isFinite(oldestStart) ? now - oldestStart : 0;
  return { from: now - Math.min(windowSeconds, Math.max(SHORTEST_WINDOW_SECONDS, age)), to: now };
}

const luminance = (hex) => {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

// Black or white, for the better contrast on a colour.
export const inkOn = (hex) => (luminance(hex) > 0.18 ? "#000000" : "#ffffff");

// The ramp with every colour computed once per drawing.
function cached(ramp) {
  const known = new Map();
  const colour = (policyVersion) => {
    if (!known.has(policyVersion)) known.set(policyVersion, ramp.colour(policyVersion));
    return known.get(policyVersion);
  };
  return { colour };
}

function drawAxis(context, { width, height, range, colours }) {
  const length = range.to - range.from;
  const wanted = Math.max(2, Math.floor(width / 85));
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600].find((s) => length / s <= wanted) ?? 7200;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "bottom";
  context.strokeStyle = colours.line;
  context.fillStyle = colours.soft;
  context.lineWidth = 1;
  for (let ago = 0; ago <= length; ago += step) {
    const x = Math.round(width - (ago / length) * width) - 0.5;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, height - AXIS_HEIGHT + 3);
    context.stroke();
    context.textAlign = ago === 0 ? "right" : "center";
    if (ago === 0 || x > 30)
      context.fillText(ago === 0 ? "now" : `${seconds(ago).replace(".0", "")} ago`, x, height - 3);
  }
}

function drawSpan(context, span, y, rowHeight, shared) {
  const { range, scale, colours, ramp } = shared;
  const bar = rowHeight >= 4 ? rowHeight - 1 : rowHeight;
  const xOf = (time) => Math.max(0, (time - range.from) * scale);
  const last = span.end ?? range.to;
  if (last < range.from) return;
  const start = xOf(span.start);
  context.fillStyle = colours.track;
  context.fillRect(start, y, Math.max(1, xOf(last) - start), bar);
  for (const interval of span.intervals) {
    if (interval.end < range.from) continue;
    const x = xOf(interval.start);
    const length = Math.max(1, xOf(Math.min(interval.end, last)) - x);
    const fill = ramp.colour(interval.policy_version);
    context.fillStyle = fill;
    context.fillRect(x, y, length, bar);
    if (interval !== span.intervals[0] && rowHeight >= 4 && length >= 3) {
      // Neighbours on a long ramp look alike: a gap shows where one version ends and the next one begins.
      context.fillStyle = colours.surface;
      context.fillRect(x, y, 1, bar);
    }
    if (rowHeight >= LABEL_ROW_HEIGHT && length >= LABEL_WIDTH) {
      context.fillStyle = inkOn(fill);
      context.fillText(`v${interval.policy_version}`, x + 4, y + bar / 2 + 0.5);
    }
  }
}

// view: {width, height, pixelRatio, rows, range, rowHeight (0: fit), top, colours, selected: {lane, span} | null}
export function drawTimeline(context, view) {
  const { width, height, rows, range, colours } = view;
  const space = height - AXIS_HEIGHT;
  context.clearRect(0, 0, width, height);
  drawAxis(context, view);
  context.save();
  context.beginPath();
  context.rect(0, 0, width, space);
  context.clip();
  context.font = "600 10px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  const shared = { range, colours, scale: width / (range.to - range.from), ramp: cached(inSight()) };
  const rowHeight = view.rowHeight;
  if (rowHeight * view.pixelRatio < 1) {
    // Several lanes share a line of pixels: every line shows one of them, evenly spread.
    const lines = Math.floor(space * view.pixelRatio);
    for (let line = 0; line < lines; line += 1) {
      const lane = Math.floor((line / lines) * rows.length);
      for (const span of rows[lane]) drawSpan(context, span, line / view.pixelRatio, 1 / view.pixelRatio, shared);
    }
  } else {
    const first = Math.max(0, Math.floor(view.top / rowHeight));
    const last = Math.min(rows.length, Math.ceil((view.top + space) / rowHeight));
    for (let lane = first; lane < last; lane += 1) {
      for (const span of rows[lane]) drawSpan(context, span, lane * rowHeight - view.top, rowHeight, shared);
    }
  }
  if (view.selected) drawSelection(context, view, shared);
  context.restore();
}

function drawSelection(context, { selected, rowHeight, top, range, colours }, { scale }) {
  const x = Math.max(0, (selected.span.start - range.from) * scale);
  const end = ((selected.span.end ?? range.to) - range.from) * scale;
  const y = selected.lane * rowHeight - top;
  context.strokeStyle = colours.ink;
  context.lineWidth = 2;
  context.strokeRect(x + 1, y, Math.max(4, end - x - 2), Math.max(3, rowHeight - 1));
}
