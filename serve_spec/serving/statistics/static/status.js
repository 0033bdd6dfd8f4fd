"use strict";

const POLL_MS = 2000;
const MOST_LINES = 8;
const UNKNOWN = "unknown";
const NO_TRIALS = "no trials: unknown";
const charts = {};

const byId = (id) => document.getElementById(id);
const shown = (value, digits = 0) =>
  value === null || value === undefined ? "–" : Number(value).toFixed(digits);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const clock = (time_s, withSeconds = true) =>
  new Date(time_s * 1000).toLocaleTimeString([], {
    hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(withSeconds && { second: "2-digit" }),
  });

// Colours of the theme, read anew for every chart.
const cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const lineColor = (i) => cssValue("--lines").split(/ +/)[i % 8];
const hue = (i) => `hsl(${(i * 137) % 360} 55% 55%)`;

/* Charts ---------------------------------------------------------------------------------- */

// data: uPlot's columns, x first. The chart is recreated when its lines change.
function draw(id, names, data, options = {}) {
  const place = byId(id);
  if (!data || !data[0].length) {
    if (charts[id]) charts[id].plot.destroy();
    delete charts[id];
    place.replaceChildren(element("p", options.empty || "no data yet"));
    return;
  }
  const key = JSON.stringify(names);
  const drawn = options.stacked ? stacked(data) : data;
  if (!charts[id] || charts[id].key !== key) {
    if (charts[id]) charts[id].plot.destroy();
    delete charts[id];
    place.replaceChildren();
    const chart = { key, data };
    chart.plot = new uPlot(settings(place, chart, names, options), drawn, place);
    charts[id] = chart;
  } else {
    charts[id].data = data;
    charts[id].plot.setData(drawn);
  }
  // The drawn values, for tests.
  place.dataset.points = data[0].length;
  place.dataset.last = JSON.stringify(data.slice(1).map((column) => column[column.length - 1]));
}

// Every column as its sum with the columns after it, so that the first one lies behind all.
function stacked([times, ...columns]) {
  const sums = columns.map((column) => [...column]);
  for (let i = sums.length - 2; i >= 0; i--) {
    sums[i] = sums[i].map((value, at) => (value === null ? null : value + sums[i + 1][at]));
  }
  return [times, ...sums];
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

function settings(place, chart, names, options) {
  const { overTime = true, range } = options;
  const axis = { stroke: cssValue("--soft"), grid: { stroke: "#8883", width: 1 }, ticks: { stroke: "#8883" } };
  const integers = { incrs: [1, 2, 5, 10], space: 30, values: (u, splits) => splits };
  const times = {
    space: 70, incrs: [1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400],
    values: (u, splits, i, space, step) => splits.map((time_s) => clock(time_s, step < 60)),
  };
  const edge = (u, low, high) => [low - 0.5, high + 0.5];
  const last = (u) => u.data[0].length - 1;
  // Without the pointer the legend shows the newest values.
  const showLast = (u) => {
    if (u.cursor.idx == null && u.legend.idx !== last(u)) u.setLegend({ idx: last(u) });
  };
  return {
    width: place.clientWidth || 420,
    height: 190,
    scales: { x: { time: overTime, ...(overTime ? {} : { range: edge }) }, y: { range } },
    axes: [
      { ...axis, ...(overTime ? times : integers) },
      { ...axis, size: 48, values: (u, splits) => splits.map((value) => compact.format(value)) },
    ],
    series: [
      { label: overTime ? "time" : options.x ?? "depth", value: (u, x) => (overTime ? clock(x) : x) },
      ...names.map((label, i) => line(chart, label, i, options)),
    ],
    hooks: { setLegend: [showLast], ready: [showLast] },
  };
}

function line(chart, label, index, { points = false, bars = false, stacked, color = lineColor, back = 0 }) {
  const stroke = color(index);
  // Replicas report at different times, so one may have its newest value a few points before.
  const value = (u, drawn, series, at) => {
    const column = chart.data[series] ?? [];
    const newest = column.slice(Math.max(0, at - back), at + 1).filter((each) => each != null);
    const own = newest.at(-1);
    if (label === NO_TRIALS) return own ? "yes" : "no";
    return own === null || own === undefined ? UNKNOWN : compact.format(own);
  };
  const style = { label, value, stroke, width: 2, spanGaps: true, points: { show: points, size: 7 } };
  if (stacked) {
    const paths = uPlot.paths.stepped({ align: -1 });
    return { ...style, fill: stroke, width: 0, spanGaps: false, paths };
  }
  if (!bars) return style;
  const dash = label === NO_TRIALS ? { dash: [4, 4], fill: "#8882" } : { fill: stroke + "55" };
  return { ...style, ...dash, paths: uPlot.paths.bars({ size: [0.5, 60] }) };
}

// Fractions of rounds over time, one area for each name.
function drawShares(id, decisions, table, { order, color, label = (name) => name }) {
  const names = Object.keys(decisions?.[table] ?? {}).sort((a, b) => order(b) - order(a));
  const data = names.length ? [decisions.time_s, ...names.map((name) => decisions[table][name])] : null;
  draw(id, names.map(label), data,
    { stacked: true, range: () => [0, 1], color: (i) => color(names[i]), empty: "no rounds yet" });
}

const fromZero = (u, low, high) => [0, Math.max(1, high) * 1.1];
const fraction = () => [0, 1.05];

function aroundOne(u, low, high) {
  return [Math.min(0.9, low * 0.95), Math.max(1.1, high * 1.05)];
}

/* Data columns ---------------------------------------------------------------------------- */

// Counters fall when a replica leaves or restarts; the rate is then unknown.
function rates(times, counts) {
  return counts.map((count, i) =>
    i === 0 || count < counts[i - 1] ? null : (count - counts[i - 1]) / (times[i] - times[i - 1]));
}

const nameOf = (replica) =>
  replica.replica_rank === null || replica.replica_rank === undefined
    ? replica.replica
    : `replica ${replica.replica_rank}`;

// One line per replica, joined on time.
function perReplica(replicas, column) {
  const some = replicas.filter((replica) => replica.history.time_s.length).slice(0, MOST_LINES);
  if (!some.length) return [[], null];
  const tables = some.map((replica) => [replica.history.time_s, replica.history[column]]);
  return [some.map(nameOf), uPlot.join(tables)];
}

// The same for ratios; 0 means unknown.
function ratioPerReplica(replicas, column) {
  const [names, table] = perReplica(replicas, column);
  return [names, table && table.map((values, i) => (i ? values.map((v) => v || null) : values))];
}

// Drafts in recent steps of all replicas, by position.
function draftsByPosition(replicas) {
  const sums = [];
  for (const replica of replicas) {
    for (const p of replica.speculation?.window?.positions ?? []) {
      const sum = (sums[p.position - 1] ??= { proposed: 0, verified: 0, accepted: 0 });
      for (const name of Object.keys(sum)) sum[name] += p[name];
    }
  }
  const column = (name) => sums.map((sum) => sum[name]);
  return [sums.map((_, i) => i + 1), column("proposed"), column("verified"), column("accepted")];
}

// Positions without trials are drawn as unknown, at full height.
function byPosition(acceptance) {
  const most = acceptance.reduce((a, b) => (b.num_replicas > (a?.num_replicas ?? -1) ? b : a), null);
  const positions = most?.positions ?? [];
  const isKnown = (p) => p.accept_rate !== null && p.trials > 0;
  return [positions.map((p) => p.position), positions.map((p) => (isKnown(p) ? p.accept_rate : null)),
    positions.map((p) => (isKnown(p) ? null : 1))];
}

const largestPowerOfTwo = (size) => 2 ** Math.floor(Math.log2(Math.max(1, size)));

// Predicted and measured speedup over plain decoding, by depth.
function breakEven(replica) {
  const predicted = replica.break_even?.tokens_per_ms ?? {};
  const bucket = String(largestPowerOfTwo(replica.break_even?.batch_size ?? replica.batch_size));
  const measured = replica.speculation?.by_batch_size?.[bucket]?.tokens_per_ms ?? {};
  const steps = [...new Set([...Object.keys(predicted), ...Object.keys(measured)])]
    .map(Number).sort((a, b) => a - b);
  const over = (speeds) => steps.map((k) => (speeds["0"] && speeds[k] ? speeds[k] / speeds["0"] : null));
  const known = over(predicted).concat(over(measured)).some((value) => value !== null);
  return known ? [steps, over(predicted), over(measured), steps.map(() => 1)] : null;
}

const tokensPerRound = (rate, steps) => {
  let tokens = 1;
  for (let i = 0; i < steps; i++) tokens = 1 + rate * tokens;
  return tokens;
};

// The uniform acceptance rate that yields `tokens` per step; null: impossible.
function rateFor(tokens, steps) {
  if (tokens > steps + 1) return null;
  let low = 0, high = 1;
  for (let i = 0; i < 40; i++) {
    const middle = (low + high) / 2;
    if (tokensPerRound(middle, steps) < tokens) low = middle; else high = middle;
  }
  return high;
}

// The break-even acceptance rate of each depth, and the measured rate.
function neededRates(replica) {
  const { round_ms: ms, tokens_per_ms: speeds } = replica.break_even ?? {};
  if (!ms || !("1" in ms)) return null;
  const steps = Object.keys(ms).map(Number).filter((k) => k > 0).sort((a, b) => a - b);
  const present = (k) => (ms[k] * speeds[k]) / replica.break_even.batch_size;
  return [
    steps,
    steps.map((k) => rateFor(ms[k] / ms["0"], k)),
    steps.map((k) => rateFor(present(k), k)),
  ];
}

const EXAMPLE = { acceptance: 0.7, target: 10, draft: 1, token: 0.02, batch: 1, depth: 7 };

// Numbers for the what-if chart: those of a replica, else round ones.
function measuredScenario(replica) {
  const { round_ms: ms, draft_ms: draft, batch_size: batch } = replica?.break_even ?? {};
  const deepest = Math.max(0, ...Object.keys(ms ?? {}).map(Number));
  if (!deepest) return { ...EXAMPLE, source: "example numbers: the replica has no cost table" };
  const perDepth = (ms[deepest] - ms["0"]) / deepest;
  const known = neededRates(replica)?.[2].at(-1);
  return {
    acceptance: known?.toFixed(2) ?? 0.7, target: ms["0"].toFixed(3), draft: draft.toFixed(3),
    token: Math.max(0, (perDepth - draft) / batch).toFixed(4), batch, depth: deepest,
    source: `predictions of ${nameOf(replica)} at batch ${batch}, taken at ${clock(Date.now() / 1000)}`,
  };
}

// Speedup of depths 0 to `depth` by the throughput equation, as `serve-spec breakeven` has it.
function scenarioSpeedups({ acceptance, target, draft, token, batch, depth }) {
  const steps = Array.from({ length: depth + 1 }, (_, k) => k);
  const stepMs = (k) => target + k * (draft + token * batch);
  return [steps, steps.map((k) => (tokensPerRound(acceptance, k) * target) / stepMs(k)),
    steps.map((k) => rateFor(stepMs(k) / target, k))];
}

/* The page -------------------------------------------------------------------------------- */

function showTiles(status) {
  const { fleet, history, router, replicas } = status;
  const guards = replicas.filter((r) => guardOf(r).guard_rounds_left);
  const pair = (ms) => (ms ? `${compact.format(ms.p50)} / ${compact.format(ms.p99)}` : "–");
  const percent = (cache) =>
    cache?.query_tokens ? `${shown((100 * cache.hit_tokens) / cache.query_tokens)}%` : "–";
  const speed = rates(history.time_s, history.decode_tokens).at(-1);
  const depths = Object.entries(fleet.replicas_by_num_steps).map(([k, n]) => `${n} at ${k}`);
  const tiles = {
    replicas: fleet.num_replicas + (fleet.num_stale ? ` (+${fleet.num_stale} stale)` : ""),
    "output tokens/s": shown(speed),
    "batch size": shown(fleet.batch_size),
    "replicas by depth": depths.join(", ") || "–",
    "accepted length (tokens/step)": shown(fleet.avg_spec_accept_length, 2),
    "speedup over plain decoding": shown(fleet.effective_speedup, 2),
    "queued at replicas": shown(fleet.num_waiting),
    "queued at router": shown(router.queue_len),
    "time to first token, ms (p50 / p99)": pair(router.ttft_ms),
    "time between tokens, ms (p50 / p99)": pair(router.token_gap_ms),
    "failed requests": shown(router.requests?.failed ?? 0),
    "refused: queue full (429)": shown(router.num_rejected),
    "prefix cache hits": percent(fleet.prefix_cache),
    "guard": guards.length ? `on at ${guards.length} of ${replicas.length}` : "off",
    "free KV pages": `${shown(fleet.kv.free_pages)} / ${shown(fleet.kv.total_pages)}`,
  };
  byId("tiles").replaceChildren(...Object.entries(tiles).map(([name, value]) => {
    const tile = element("div", undefined, "tile");
    tile.dataset.name = name;
    tile.append(element("b", value), element("span", name));
    return tile;
  }));
}

// The guard at the replica's present batch size.
const guardOf = (replica) => replica.slots?.[replica.slot] ?? {};

function guardState(replica) {
  const { guard_rounds_left: left, measured_speedup: speedup } = guardOf(replica);
  if (left === undefined) return "–";
  const measured = speedup ? `; drafting measured ${shown(speedup, 2)} times plain` : "";
  return (left ? `on for ${left} more rounds` : "off") + measured;
}

function showTable(id, columns, rows) {
  const head = element("tr");
  head.append(...columns.map((name) => element("th", name)));
  byId(id).replaceChildren(head, ...rows.map(({ cells, className }) => {
    const row = element("tr", undefined, className);
    row.append(...cells.map((cell, i) => {
      const made = element("td", cell);
      made.dataset.label = columns[i];
      return made;
    }));
    return row;
  }));
}

function lastDecision(r) {
  const refused = r.refused_user_config ? ` (user_config rejected: ${r.refused_user_config})` : "";
  const costs = r.costs?.state === "missing" ? ` (no cost table: ${r.costs.detail})` : "";
  return [r.last_reason ?? "–", r.decision ?? r.fallback].filter(Boolean).join(": ") + costs + refused;
}

function showReplicas(replicas) {
  const columns = ["replica", "strategy", "depth", "batch", "running", "waiting", "free pages",
    "accepted length", "speedup", "guard", "last decision", "last report"];
  showTable("replicas", columns, replicas.map((r) => ({
    className: r.stale ? "stale" : "",
    cells: [nameOf(r), r.strategy ?? "–", shown(r.speculative_num_steps), shown(r.batch_size),
      shown(r.num_running), shown(r.num_waiting), shown(r.kv?.free_pages),
      shown(r.avg_spec_accept_length, 2), shown(r.speculation?.effective_speedup, 2),
      guardState(r), lastDecision(r), `${shown(r.age_s, 1)} s ago`],
  })));
}

function chosen(replicas) {
  const select = byId("chosen");
  const names = replicas.map((replica) => replica.replica);
  const before = select.value;
  if (names.join() !== [...select.options].map((option) => option.value).join()) {
    select.replaceChildren(...replicas.map((replica) => new Option(nameOf(replica), replica.replica)));
    if (names.includes(before)) select.value = before;
  }
  return replicas.find((replica) => replica.replica === select.value);
}

// The numbers stay as they were when the replica was chosen, until "as measured" takes new ones.
let taken;

function showScenario(replica) {
  const inputs = [...byId("scenario").querySelectorAll("input")];
  if (!taken || taken.replica !== replica?.replica || (!taken.isMeasured && replica?.break_even)) {
    const isMeasured = Boolean(replica?.break_even);
    taken = { replica: replica?.replica, isMeasured, numbers: measuredScenario(replica) };
  }
  for (const input of inputs) if (!input.dataset.edited) input.value = taken.numbers[input.name];
  const edited = inputs.some((input) => input.dataset.edited);
  byId("source").textContent = (edited ? "edited; the others: " : "") + taken.numbers.source;
  const answer = byId("answer");
  const wrong = inputs.find((input) => !input.checkValidity() || input.value === "");
  if (wrong) {
    answer.textContent = `${wrong.parentElement.textContent.trim()}: ${wrong.validationMessage || "missing"}`;
    return;
  }
  const scenario = Object.fromEntries(inputs.map((input) => [input.name, Number(input.value)]));
  const [steps, speedups, needed] = scenarioSpeedups(scenario);
  draw("whatif", ["speedup", "break-even"], [steps, speedups, steps.map(() => 1)],
    { overTime: false, range: aroundOne, points: true });
  const best = speedups.indexOf(Math.max(...speedups));
  const least = Math.min(...needed.slice(1).map((rate) => rate ?? Infinity));
  const pays = least <= 1 ? `drafts pay above an acceptance rate of ${shown(least, 2)}` : "drafts never pay";
  answer.textContent = best
    ? `fastest: depth ${best}, ${shown(speedups[best], 2)} times plain decoding; ${pays}`
    : `fastest: no speculation; ${pays}`;
}

// Ray names itself by a loopback address where it listens on that only, or on one host.
function linkRay(address) {
  const link = byId("ray");
  link.hidden = !address;
  if (address) link.href = `http://${address.replace(/^(127\.0\.0\.1|localhost)/, location.hostname)}`;
}

let latest, latestStatus;

function show(status) {
  latestStatus = status;
  const { fleet, history, replicas } = status;
  byId("model").textContent = status.model;
  byId("forced").hidden = !replicas.some((replica) => (replica.synthetic_acceptance ?? null) !== null);
  linkRay(status.ray_dashboard);
  showTiles(status);
  draw("throughput", ["tokens/s"],
    [history.time_s, rates(history.time_s, history.decode_tokens)], { range: fromZero });
  const back = 2 * Math.min(replicas.length, MOST_LINES);
  draw("batch", ...perReplica(replicas, "batch_size"), { range: fromZero, back });
  draw("length", ...perReplica(replicas, "tokens_per_step"), { range: fromZero, back });
  draw("drafts", ["proposed", "verified", "accepted"], draftsByPosition(replicas),
    { overTime: false, x: "position", range: fromZero, points: true, empty: "no recent drafts" });
  draw("calibration", ...ratioPerReplica(replicas, "observed_to_expected"), { range: aroundOne, back });
  draw("steptime", ...ratioPerReplica(replicas, "measured_to_predicted"), { range: aroundOne, back });
  draw("positions", ["accepted", NO_TRIALS], byPosition(fleet.acceptance),
    { overTime: false, x: "position", range: fraction, bars: true, empty: "no drafts yet" });
  const replica = chosen(replicas);
  const reasons = Object.keys(status.reasons ?? {});
  byId("why").textContent = replica ? `${replica.last_reason ?? ""}: ${replica.decision ?? "no decision yet"}` : "";
  const made = replica?.decisions;
  drawShares("bydepth", made, "by_num_steps", {
    order: parseFloat,
    color: (depth) => (depth.includes("x") ? hue(parseInt(depth, 10)) : lineColor(parseInt(depth, 10))),
    label: (depth) => (depth === "0" ? "plain" : `depth ${depth}`),
  });
  const place = (name) => reasons.indexOf(name);
  drawShares("byreason", made, "by_reason", { order: place, color: (name) => hue(place(name)) });
  draw("budget", ["budget"], made?.budget.some(Boolean) ? [made.time_s, made.budget] : null,
    { range: fromZero, points: true, empty: "no budget: all drafts are verified" });
  draw("breakeven", ["predicted", "measured", "break-even"], replica && breakEven(replica),
    { overTime: false, range: aroundOne, points: true, empty: "no comparison of depths yet" });
  draw("needed", ["break-even", "measured"], replica && neededRates(replica),
    { overTime: false, range: fraction, points: true, empty: "available only with strategy goodput" });
  latest = replica;
  showScenario(replica);
  showReplicas(replicas);
  const meanings = { ...Object.fromEntries(Object.keys(fleet.switches).map((r) => [r, ""])), ...status.reasons };
  showTable("switches", ["reason", "depth switches", "meaning"], Object.entries(meanings).map(
    ([reason, meaning]) => ({ cells: [reason, fleet.switches[reason] ?? 0, meaning] })));
}

async function poll() {
  const state = byId("state");
  try {
    const answer = await fetchWithKey("status.json");
    byId("key").hidden = answer.status !== 401;
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
    state.textContent = `updated ${clock(Date.now() / 1000)}`;
    state.className = "";
  } catch (error) {
    state.textContent = `no response: ${error.message}`;
    state.className = "bad";
  }
  setTimeout(poll, POLL_MS);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", event.target.querySelector("input").value);
});
byId("scenario").addEventListener("input", (event) => {
  event.target.dataset.edited = true;
  showScenario(latest);
});
byId("scenario").addEventListener("reset", (event) => {
  event.preventDefault();
  for (const input of event.target.querySelectorAll("input")) delete input.dataset.edited;
  taken = undefined;
  showScenario(latest);
});
byId("scenario").addEventListener("submit", (event) => event.preventDefault());
byId("chosen").addEventListener("change", () => show(latestStatus));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const id of Object.keys(charts)) {
    charts[id].plot.destroy();
    delete charts[id];
  }
  if (latestStatus) show(latestStatus);
});
addEventListener("resize", () => {
  for (const [id, { plot }] of Object.entries(charts)) {
    plot.setSize({ width: byId(id).clientWidth, height: plot.height });
  }
});
poll();
