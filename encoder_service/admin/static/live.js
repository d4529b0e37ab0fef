// The live half of the page: requests /metrics every second and draws them. No build step, no library.
// The metrics count since the service's start. Rates and percentiles are computed from two answers.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const CHARTS_S = 120;
const STAGES_S = 60;
const NOW_S = 10;
// How an item was answered, by the tier's name in the service.
export const TIERS = {
  miss: "encoded",
  in_flight: "joined an encode in progress",
  device: "found in the device tier",
  host: "found in the host tier",
};
const answers = []; // within the time span of the charts, oldest first

// The samples of a text in Prometheus' format by their names.
function parsed(text) {
  const found = {};
  for (const [, name, labels, value] of text.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const pairs = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((match) => match.slice(1));
    (found[name] ??= []).push({ labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return found;
}

const samples = (live, name) => live.metrics[name] ?? [];
const total = (live, name) => sum(samples(live, name).map((sample) => sample.value));
const by = (live, name, label) =>
  Object.fromEntries(samples(live, name).map((sample) => [sample.labels[label], sample.value]));

function remember(live) {
  if (answers.length && live.instance !== answers.at(-1).instance) answers.length = 0; // the service restarted
  answers.push(live);
  while (answers[1]?.at_s < live.at_s - CHARTS_S) answers.shift();
}

// The newest answer that is at least `seconds` older than the last one, or else the oldest answer.
function before(seconds) {
  const last = answers.at(-1);
  return answers.findLast((live) => live.at_s <= last.at_s - seconds) ?? answers[0];
}

const sum = (counts) => Object.values(counts).reduce((so_far, value) => so_far + value, 0);
const delivered = (live) => total(live, "ve_items_total");
const encoded = (live) => total(live, "ve_encoded_items_total");
const busy = (live) => total(live, "ve_device_busy_seconds_total");
const rejected = (live) => total(live, "ve_rejections_total");
const queued_s = (live) => total(live, "ve_queued_device_seconds");

function rate(from, to, figure) {
  const seconds = to.at_s - from.at_s;
  return seconds > 0 ? (figure(to) - figure(from)) / seconds : 0;
}

const busyShare = (from, to) => Math.min(1, rate(from, to, busy));
const buckets = (live, stage) =>
  samples(live, "ve_stage_seconds_bucket").filter((sample) => sample.labels.stage === stage);

// Increase of the counts in a stage's histogram between two answers, not cumulative.
function gained(from, to, stage) {
  const earlier = buckets(from, stage);
  const cumulative = buckets(to, stage).map((sample, index) => sample.value - earlier[index].value);
  return cumulative.map((count, index) => count - (cumulative[index - 1] ?? 0));
}

// The histogram's upper bounds in seconds, without the last one, infinity.
const bounds = (live) => buckets(live, "total").slice(0, -1).map((sample) => Number(sample.labels.le));

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
  const latency = (share) => of((from, to) => percentile(bounds(to), gained(from, to, "total"), share));
  return {
    t_s: of((_, to) => to.at_s - last.at_s),
    items_per_s: of((from, to) => rate(from, to, delivered)),
    encoded_per_s: of((from, to) => rate(from, to, encoded)),
    busy_share: of(busyShare),
    queued_ms: of((_, to) => 1000 * queued_s(to)),
    p50_ms: latency(0.5),
    p99_ms: latency(0.99),
  };
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
  const from = before(NOW_S);
  const totals = gained(before(STAGES_S), live, "total");
  const latency = (share) => ms(percentile(bounds(live), totals, share));
  const missed = (answer) => by(answer, "ve_items_total", "tier").miss ?? 0;
  const asked = delivered(live) - delivered(from);
  const found = asked ? 1 - (missed(live) - missed(from)) / asked : 0;
  const refused = rate(from, live, rejected);
  const saturation = total(live, "ve_saturation_ratio");
  const level = (share) => (share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "");
  const shown = [
    ["delivered", count(rate(from, live, delivered)), "/s"],
    ["encoded", count(rate(from, live, encoded)), "/s"],
    ["latency p50", latency(0.5), ""],
    ["latency p99", latency(0.99), ""],
    ["queue", ms(queued_s(live) * 1e3), ""],
    ["patches queued", count(total(live, "ve_queued_patches")), ""],
    ["device busy", percent(busyShare(from, live)), ""],
    ["saturation", percent(saturation), "", level(saturation)],
    ["found in cache", percent(found), ""],
    ["turned away", count(refused), "/s", refused > 0 ? "bad" : ""],
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

function panels(live, info) {
  const from = before(STAGES_S);
  const names = new Set(samples(live, "ve_stage_seconds_bucket").map((sample) => sample.labels.stage));
  const stages = [...names].map((stage) => [stage, gained(from, live, stage)]);
  fill(
    byId("stages"),
    stages.filter(([, counts]) => sum(counts)).map(([stage, counts]) => [
      stage, count(sum(counts)), ...[0.5, 0.9, 0.99].map((share) => ms(percentile(bounds(live), counts, share))),
    ]),
    ["stage", "passed", "p50", "p90", "p99"],
  );
  const runs = Object.entries(by(live, "ve_bucket_runs_total", "patches"));
  if (runs.length) {
    const padded = total(live, "ve_padded_patches_total");
    const waste = percent(padded / (padded + total(live, "ve_encoded_patches_total")));
    const eager = count(total(live, "ve_eager_runs_total"));
    bars(byId("buckets"), runs, count);
    byId("buckets").append(element("p", `${waste} of patches are padding, ${eager} batches ran eager`, "quiet"));
  } else {
    const hasGraphs = samples(live, "ve_graph_replays_total").length;
    const why = hasGraphs ? "no batch has run in a bucket yet" : "no graphs on this device: every batch has its own shape";
    byId("buckets").replaceChildren(element("p", `${count(total(live, "ve_batches_total"))} batches; ${why}`, "quiet"));
  }
  const tiers = by(live, "ve_items_total", "tier");
  const held = Object.entries(by(live, "ve_store_items", "tier")).map(([tier, items]) => `${count(items)} items in the ${tier} tier`);
  fill(byId("cache"), [
    ["held", `${held.join(", ")}, ${bytes(total(live, "ve_store_bytes"))} of ${bytes(info.limits.store_bytes)}`],
    ...Object.entries(TIERS).map(([tier, text]) => [text, count(tiers[tier] ?? 0)]),
    ["evicted", count(total(live, "ve_store_evictions_total"))],
    ["found no room", count(total(live, "ve_store_refused_total"))],
    ...samples(live, "ve_arena_bytes").map(({ labels, value }, index) => [
      `${labels.memory} arena${labels.namespace ? " of " + labels.namespace : ""}`,
      `${bytes(samples(live, "ve_arena_free_bytes")[index].value)} of ${bytes(value)} free`,
    ]),
  ]);
  const transports = by(live, "ve_deliveries_total", "transport");
  const connections = samples(live, "ve_broker_connections");
  fill(byId("reads"), [
    ...["inline", "host", "device"].map((name) => [
      `delivered ${name === "inline" ? "inline" : "by place, " + name}`, count(transports[name] ?? 0),
    ]),
    ...(connections.length ? [
      ["broker connections", count(connections[0].value)],
      ["reads reported / lost", `${count(total(live, "ve_directory_reads_total"))} / ${count(total(live, "ve_reads_lost_total"))}`],
      ["encoded again", count(total(live, "ve_encodes_repeated_total"))],
    ] : [["shared memory", "off"]]),
  ]);
  const failures = Object.entries(by(live, "ve_item_failures_total", "reason"));
  fill(byId("failures"), failures.length ? failures.map(([reason, value]) => [reason, count(value)]) : [["none since the start", ""]]);
}

function state(text, name) {
  byId("state").textContent = text;
  byId("state").className = "state " + name;
}

function show(metrics, ready, info) {
  state(ready.status === "ready" ? "ready" : `not ready: ${ready.reason}`, ready.status === "ready" ? "good" : "bad");
  if (!info.models) return; // not loaded yet
  const live = { at_s: performance.now() / 1000, instance: info.instance_id, metrics: parsed(metrics) };
  remember(live);
  const model = info.models[0];
  const dtype = model.dtype.replace("DTYPE_", "").toLowerCase();
  byId("model").textContent = `${model.name} (${model.family}) on ${info.device}, ${dtype}`;
  byId("playground").hidden = info.playground_max_bytes === 0;
  byId("drop-limit").textContent = `at most ${bytes(info.playground_max_bytes)}; encoded like every request, after those that wait`;
  tiles(live);
  const points = series();
  chart("chart-items", points, ["items_per_s", "encoded_per_s"], (top) => count(top) + "/s");
  chart("chart-latency", points, ["p50_ms", "p99_ms"], ms);
  chart("chart-busy", points, ["busy_share"], percent, 1);
  chart("chart-queue", points, ["queued_ms"], ms);
  panels(live, info);
}

async function refresh() {
  try {
    const [metrics, ready, info] = await Promise.all(["metrics", "readyz", "v1/info"].map((path) => fetch(path)));
    show(await metrics.text(), await ready.json(), await info.json());
  } catch (error) {
    state("no answer from the service", "bad");
  }
  setTimeout(refresh, document.hidden ? 5000 : 1000);
}

refresh();
