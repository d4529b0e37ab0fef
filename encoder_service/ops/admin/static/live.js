// The live half of the page: requests /v1/live every second and draws the answers. No build step, no library.
// The service answers with counters since its start. Rates and percentiles are computed from two answers.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const CHARTS_S = 120;
const STAGES_S = 60;
const NOW_S = 10;
// How an item was answered, by the tier's name in the service.
export const TIERS = {
  miss: "encoded",
  joined: "joined an encode in progress",
  device: "found in the device tier",
  host: "found in the host tier",
};
const answers = []; // within the time span of the charts, oldest first

function remember(live) {
  if (answers.length && live.uptime_s < answers.at(-1).uptime_s) answers.length = 0; // the service restarted
  answers.push(live);
  while (answers[1]?.uptime_s < live.uptime_s - CHARTS_S) answers.shift();
}

// The newest answer that is at least `seconds` older than the last one, or else the oldest answer.
function before(seconds) {
  const last = answers.at(-1);
  return answers.findLast((live) => live.uptime_s <= last.uptime_s - seconds) ?? answers[0];
}

const sum = (counts) => Object.values(counts).reduce((total, value) => total + value, 0);
const delivered = (live) => sum(live.tiers);
const encoded = (live) => live.encoded;
const busy = (live) => live.busy_s;

function rate(from, to, figure) {
  const seconds = to.uptime_s - from.uptime_s;
  return seconds > 0 ? (figure(to) - figure(from)) / seconds : 0;
}

// Increase of the counts in a stage's histogram between two answers.
const gained = (from, to, stage) => to.stages[stage].map((count, index) => count - from.stages[stage][index]);

// The percentile in milliseconds, interpolated linearly within a bucket; null without observations.
function percentile(bounds, counts, share) {
  const rank = share * sum(counts);
  if (!rank) return null;
  let below = 0;
  for (const [index, upper] of bounds.entries()) {
    const lower = index ? bounds[index - 1] : 0;
    if (counts[index] && below + counts[index] >= rank) {
      return 1000 * (lower + ((upper - lower) * (rank - below)) / counts[index]);
    }
    below += counts[index];
  }
  return 1000 * bounds.at(-1);
}

// One point for each pair of successive answers.
function series() {
  const last = answers.at(-1);
  const pairs = answers.slice(1).map((to, index) => [answers[index], to]);
  const of = (point) => pairs.map(([from, to]) => point(from, to));
  const latency = (share) =>
    of((from, to) => percentile(to.bucket_bounds_s, gained(from, to, "total"), share));
  return {
    t_s: of((_, to) => to.uptime_s - last.uptime_s),
    items_per_s: of((from, to) => rate(from, to, delivered)),
    encoded_per_s: of((from, to) => rate(from, to, encoded)),
    busy_share: of((from, to) => Math.min(1, rate(from, to, busy))),
    queued_ms: of((_, to) => 1000 * to.now.queued_s),
    p50_ms: latency(0.5),
    p99_ms: latency(0.99),
  };
}

function heldIn(tiers) {
  return Object.entries(tiers).map(([tier, items]) => `${count(items)} items in the ${tier} tier`).join(", ");
}

export function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

export function count(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(value >= 1e7 ? 0 : 1) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(value >= 1e5 ? 0 : 1) + " k";
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 2 : 1);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return (unit && value < 100 ? value.toFixed(1) : value.toFixed(0)) + " " + units[unit];
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return (value / 1000).toFixed(2) + " s";
  return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) + " ms";
}

const percent = (share) => (share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %";

export function fill(table, rows, heads) {
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    row.forEach((cell, index) => {
      const made = element(index ? "td" : "th");
      if (cell instanceof Node) made.append(cell);
      else made.textContent = cell;
      line.append(made);
    });
    body.append(line);
  }
  if (!heads) return table.replaceChildren(body);
  const head = element("thead");
  const line = element("tr");
  for (const text of heads) line.append(element("th", text));
  head.append(line);
  table.replaceChildren(head, body);
}

export function bars(box, entries, show) {
  const grid = element("div", undefined, "bars");
  const most = Math.max(...entries.map((entry) => entry[1]), 1e-9);
  for (const [name, value] of entries) {
    const bar = element("i");
    bar.style.width = (100 * value) / most + "%";
    const holder = element("div");
    holder.append(bar);
    grid.append(element("span", name), holder, element("span", show(value)));
  }
  box.replaceChildren(grid);
}

function tiles(live) {
  const now = live.now;
  const from = before(NOW_S);
  const totals = gained(before(STAGES_S), live, "total");
  const latency = (share) => ms(percentile(live.bucket_bounds_s, totals, share));
  const asked = delivered(live) - delivered(from);
  const missed = live.tiers.miss - from.tiers.miss;
  const rejected = rate(from, live, (answer) => sum(answer.rejections));
  const level = (share) => (share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "");
  const shown = [
    ["delivered", count(rate(from, live, delivered)), "/s"],
    ["encoded", count(rate(from, live, encoded)), "/s"],
    ["latency p50", latency(0.5), ""],
    ["latency p99", latency(0.99), ""],
    ["queue", ms(now.queued_s * 1e3), ""],
    ["patches queued", count(now.queued_patches), ""],
    ["device busy", percent(now.busy_share), ""],
    ["saturation", percent(now.saturation), "", level(now.saturation)],
    ["found in cache", percent(asked ? 1 - missed / asked : 0), ""],
    ["turned away", count(rejected), "/s", rejected > 0 ? "bad" : ""],
  ];
  byId("tiles").replaceChildren(
    ...shown.map(([name, value, unit, mark]) => {
      const tile = element("div", undefined, "tile " + (mark || ""));
      const figure = element("b", value + " ");
      figure.append(element("small", unit));
      tile.append(figure, element("span", name));
      return tile;
    }),
  );
}

function path(times, values, span, top, name) {
  const drawn = document.createElementNS(SVG, "path");
  const at = (index) => (600 * (1 + times[index] / span)).toFixed(1);
  const end = (index) => (name === "area" ? `L${at(index)} 150Z` : "");
  let line = "";
  let from = null;  // index at which the current line segment begins; seconds without a value are gaps
  values.forEach((value, index) => {
    if (value === null) {
      if (from !== null) line += end(index - 1);
      from = null;
      return;
    }
    const y = (147 - (142 * value) / top).toFixed(1);
    if (from === null) line += name === "area" ? `M${at(index)} 150L${at(index)} ${y}` : `M${at(index)} ${y}h.1`;
    else line += `L${at(index)} ${y}`;
    from ??= index;
  });
  if (from !== null) line += end(values.length - 1);
  drawn.setAttribute("d", line);
  drawn.setAttribute("class", name);
  return drawn;
}

// A round number at or above the largest value, so that the scale seldom changes.
function ceiling(values, least) {
  const most = Math.max(least, ...values.filter((value) => value !== null));
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}

function chart(id, series, names, show, fixed) {
  const box = byId(id);
  const times = series.t_s;
  const span = CHARTS_S;
  const columns = names.map((name) => series[name] || []);
  const top = fixed ?? ceiling(columns.flat(), 1);
  const marks = columns.map((values, index) => path(times, values, span, top, "ab"[index]));
  if (columns.length) marks.unshift(path(times, columns[0], span, top, "area"));
  box.replaceChildren(...marks);
  box.nextElementSibling.replaceChildren(
    element("span", "2 min ago"), element("span", "full height " + show(top)), element("span", "now"),
  );
}

function panels(live) {
  const from = before(STAGES_S);
  const stages = Object.keys(live.stages).map((stage) => [stage, gained(from, live, stage)]);
  fill(
    byId("stages"),
    stages.filter(([, counts]) => sum(counts)).map(([stage, counts]) => [
      stage, count(sum(counts)),
      ...[0.5, 0.9, 0.99].map((share) => ms(percentile(live.bucket_bounds_s, counts, share))),
    ]),
    ["stage", "passed", "p50", "p90", "p99"],
  );
  const buckets = live.buckets;
  if (buckets.graphs && buckets.runs.length) {
    bars(byId("buckets"), buckets.runs.map((entry) => [String(entry.patches), entry.runs]), count);
    byId("buckets").append(
      element("p", `${percent(buckets.waste_share)} of patches are padding, ${count(buckets.eager_runs)} batches ran eager`, "quiet"),
    );
  } else {
    const why = buckets.graphs ? "no batch has run in a bucket yet" : "no graphs on this device: every batch has its own shape";
    byId("buckets").replaceChildren(element("p", `${count(buckets.batches)} batches; ${why}`, "quiet"));
  }
  const cache = live.cache;
  fill(byId("cache"), [
    ["held", `${heldIn(cache.items)}, ${bytes(cache.bytes)} of ${bytes(cache.max_bytes)}`],
    ...Object.entries(live.tiers).map(([tier, value]) => [TIERS[tier], count(value)]),
    ["evicted", count(cache.evictions)],
    ["found no room", count(cache.refused)],
    ...cache.arenas.map((arena) => [
      `${arena.kind} arena${arena.namespace ? " of " + arena.namespace : ""}`,
      `${bytes(arena.free_bytes)} of ${bytes(arena.bytes)} free`,
    ]),
  ]);
  const reads = live.reads;
  fill(byId("reads"), [
    ...Object.entries(live.transports).map(([name, value]) => [`delivered ${name === "inline" ? "inline" : "by place, " + name}`, count(value)]),
    ...(reads.connections === undefined ? [["shared memory", "off"]] : [
      ["broker connections", count(reads.connections)],
      ["reads reported / lost", `${count(reads.reported)} / ${count(reads.lost)}`],
      ["encoded again", count(reads.repeated)],
    ]),
  ]);
  const failures = Object.entries(live.failures);
  fill(byId("failures"), failures.length ? failures.map(([reason, value]) => [reason, count(value)]) : [["none since the start", ""]]);
}

function state(text, name) {
  byId("state").textContent = text;
  byId("state").className = "state " + name;
}

function show(live, ready) {
  state(ready.status === "ready" ? "ready" : `not ready: ${ready.reason}`, ready.status === "ready" ? "good" : "bad");
  if (!live.attached) return;
  remember(live);
  const model = live.model;
  byId("model").textContent = `${model.name} (${model.family}) on ${model.device}, ${model.dtype}; up ${Math.floor(live.uptime_s / 60)} min`;
  byId("playground").hidden = live.playground_max_bytes === 0;
  byId("drop-limit").textContent = `at most ${bytes(live.playground_max_bytes)}; encoded like every request, after those that wait`;
  tiles(live);
  const points = series();
  chart("chart-items", points, ["items_per_s", "encoded_per_s"], (top) => count(top) + "/s");
  chart("chart-latency", points, ["p50_ms", "p99_ms"], ms);
  chart("chart-busy", points, ["busy_share"], percent, 1);
  chart("chart-queue", points, ["queued_ms"], ms);
  panels(live);
}

async function refresh() {
  try {
    const [live, ready] = await Promise.all(["v1/live", "readyz"].map(async (path) => (await fetch(path)).json()));
    show(live, ready);
  } catch (error) {
    state("no answer from the service", "bad");
  }
  setTimeout(refresh, document.hidden ? 5000 : 1000);
}

refresh();
