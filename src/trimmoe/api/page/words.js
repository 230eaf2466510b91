// How figures and fates are put into words.

/** What became of a token: its word, and what that means. */
const FATES = {
  local: "all of it ran on the server it was on",
  remote: "some expert ran on another server",
  guessed: "its server had guessed it, and full depth agreed",
  substitute: "a similar expert ran in the place of one that it chose",
  "stand-in": "a copy in few bits stood in for an expert that it chose",
  skipped: "some layers were left out",
  exited: "it was sure before its last layers",
  withdrawn: "something else had set out in its place and was withdrawn",
  prompt: "it came out of the prompt",
};

/** A letter of a trace: its class and its word. */
const LAYERS = {
  l: ["local", "local"],
  r: ["remote", "remote"],
  s: ["substitute", "substitute"],
  S: ["substitute", "substitute, remote"],
  c: ["stand-in", "stand-in"],
  C: ["stand-in", "stand-in, remote"],
  "-": ["skipped", "skipped"],
  x: ["exited", "exited before"],
};

const AHEAD = { guess: "guessed", copy: "copied from above", draft: "drafted at an exit" };

/** Between a figure and its unit: no line ends there. */
const THIN = "\u202f";

function bytes(size) {
  if (!size) return "0";
  const step = Math.min(4, Math.floor(Math.log10(size) / 3));
  const value = size / 1000 ** step;
  return `${value.toFixed(value < 10 && step ? 1 : 0)}${THIN}${["B", "kB", "MB", "GB", "TB"][step]}`;
}

function seconds(value) {
  if (!value) return `0${THIN}ms`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)}${THIN}ms`;
  if (value < 100) return `${value.toFixed(1)}${THIN}s`;
  return value < 7200 ? `${Math.round(value / 60)}${THIN}min` : `${(value / 3600).toFixed(1)}${THIN}h`;
}

const percent = (share) => `${Math.round(100 * share)}${THIN}%`;

/** The same for style sheets. */
const wide = (share) => `${Math.round(100 * Math.min(1, share))}%`;

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const spaced = (word) => JSON.stringify(word).slice(1, -1);

/** Runs of the same value: `[first, last, value]`. */
function runs(values) {
  const made = [];
  values.forEach((value, at) => {
    const last = made.at(-1);
    if (last && last[2] === value) last[1] = at;
    else made.push([at, at, value]);
  });
  return made;
}
