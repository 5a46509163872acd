// Numbers as people read them.

const UNKNOWN = "–";

function grouped(value) {
  return Math.round(value).toLocaleString("en-US");
}

function ratio(value) {
  return value === null ? UNKNOWN : value.toFixed(value < 1.1 && value > 0.9 ? 3 : 2);
}

function bytes(value) {
  if (value === null) return UNKNOWN;
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

function gib(value) {
  return value === null ? UNKNOWN : `${(value / 2 ** 30).toFixed(value < 2 ** 30 ? 2 : 1)} GiB`;
}

function duration(seconds) {
  if (seconds === null) return UNKNOWN;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(1e3 * seconds).toFixed(1)} ms` : `${Math.round(1e6 * seconds)} µs`;
}

// A rank's number, or the name of an attention server, which come after the ranks; and the same in full.
function rankLabel(step, rank) {
  return rank < step.num_ranks ? `${rank}` : `server ${step.servers[rank - step.num_ranks] ?? rank - step.num_ranks}`;
}

function rankName(step, rank) {
  return rank < step.num_ranks ? `rank ${rank}` : rankLabel(step, rank);
}

function cell(value) {
  if (value === null) return UNKNOWN;
  if (typeof value === "string") return value;
  return Number.isInteger(value) ? value.toLocaleString("en-US") : value.toFixed(Math.abs(value) < 10 ? 3 : 1);
}

function sum(values) {
  return values.reduce((total, value) => total + (value || 0), 0);
}

// Round numbers from 0 to most, about as many as wanted.
function ticksUpTo(most, wanted) {
  const raw = most / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw) || power;
  const ticks = [];
  for (let at = 0; at * step <= most * 1.0001; at += 1) ticks.push(at * step);
  return ticks;
}
