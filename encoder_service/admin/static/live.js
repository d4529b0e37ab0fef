// The live half of the page: requests /metrics and /v1/times every second and draws them. No build step, no
// library. The metrics count since the service's start; rates are computed from two answers. Percentiles are times
// that the service has observed.

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
const answers = []; // of the last minute, oldest first
let points = restored(); // of the charts, oldest first

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

// Points from before a reload of the page.
function restored() {
  try {
    return JSON.parse(sessionStorage.getItem("points")) ?? [];
  } catch (error) {
    return [];
  }
}

function remember(live) {
  if (answers.length && live.instance !== answers.at(-1).instance) answers.length = 0; // the service restarted
  points = points.filter((point) => point.instance === live.instance && point.at_s > live.at_s - CHARTS_S);
  points.push(pointOf(live, answers.at(-1)));
  answers.push(live);
  while (answers[1]?.at_s < live.at_s - STAGES_S) answers.shift();
  try {
    sessionStorage.setItem("points", JSON.stringify(points));
  } catch (error) {} // the browser keeps nothing
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
// What the charts show of the newest answer. Rates need the one before it.
function pointOf(live, earlier) {
  const since = (figure) => (earlier ? figure(earlier, live) : null);
  return {
    at_s: live.at_s,
    instance: live.instance,
    items_per_s: since((from, to) => rate(from, to, delivered)),
    encoded_per_s: since((from, to) => rate(from, to, encoded)),
    busy_share: since(busyShare),
    queued_ms: 1000 * queued_s(live),
    p50_ms: live.times.new?.p50 ?? null,
    p99_ms: live.times.new?.p99 ?? null,
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

const counted = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;
const batches = (value) => counted(value, "batch", "batches");
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
  const latency = live.times.stages.total;
  const missed = (answer) => by(answer, "ve_items_total", "tier").miss ?? 0;
  const asked = delivered(live) - delivered(from);
  const found = asked ? 1 - (missed(live) - missed(from)) / asked : 0;
  const refused = rate(from, live, rejected);
  const saturation = total(live, "ve_saturation_ratio");
  const level = (share) => (share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "");
  const shown = [
    ["delivered", count(rate(from, live, delivered)), "/s"],
    ["encoded", count(rate(from, live, encoded)), "/s"],
    ["latency p50", ms(latency?.p50), ""],
    ["latency p99", ms(latency?.p99), ""],
    ["queue", ms(queued_s(live) * 1e3), ""],
    ["patches queued", count(total(live, "ve_queued_patches")), ""],
    ["device busy", percent(busyShare(from, live)), ""],
    ["event loop busy", percent(total(live, "ve_loop_busy_ratio")), ""],
    ["decoding busy", percent(total(live, "ve_decode_busy_ratio")), ""],
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

// Dots for values without a neighbour, which draw no line.
function dots(times, values, span, top, name) {
  const isAlone = (value, index) =>
    value !== null && (values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null;
  const drawn = path(times, values.map((value, index) => (isAlone(value, index) ? value : null)), span, top, name);
  drawn.setAttribute("class", name + " dot");
  return drawn;
}

// A round number at or above the largest value, so that the scale seldom changes.
function ceiling(values, least) {
  const most = Math.max(least, ...values.filter((value) => value !== null));
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}

function chart(id, names, show, fixed) {
  const box = byId(id);
  const times = points.map((point) => point.at_s - points.at(-1).at_s);
  const span = CHARTS_S;
  const columns = names.map((name) => points.map((point) => point[name]));
  const top = fixed ?? ceiling(columns.flat(), 1);
  const marks = [path, dots].flatMap((draw) =>
    columns.map((values, index) => draw(times, values, span, top, "ab"[index])).reverse());
  marks.unshift(path(times, columns[0], span, top, "area"));
  box.replaceChildren(...marks);
  box.nextElementSibling.replaceChildren(
    element("span", "2 min ago"), element("span", "full height " + show(top)), element("span", "now"),
  );
}

function panels(live, info) {
  const { stages, max_passed } = live.times;
  fill(
    byId("stages"),
    Object.entries(stages).map(([stage, { passed, p50, p90, p99 }]) => [
      stage, passed < max_passed ? count(passed) : `last ${max_passed}`, ms(p50), ms(p90), ms(p99),
    ]),
    ["stage", "passed", "p50", "p90", "p99"],
  );
  const runs = Object.entries(by(live, "ve_bucket_runs_total", "patches"));
  if (runs.length) {
    const padded = total(live, "ve_padded_patches_total");
    const waste = percent(padded / (padded + total(live, "ve_encoded_patches_total")));
    const eager = batches(total(live, "ve_eager_runs_total"));
    bars(byId("buckets"), runs, count);
    byId("buckets").append(element("p", `${waste} of patches are padding, ${eager} ran eager`, "quiet"));
  } else {
    const hasGraphs = samples(live, "ve_graph_replays_total").length;
    const why = hasGraphs ? "no batch has run in a bucket yet" : "no graphs on this device: every batch has its own shape";
    byId("buckets").replaceChildren(element("p", `${batches(total(live, "ve_batches_total"))}; ${why}`, "quiet"));
  }
  const tiers = by(live, "ve_items_total", "tier");
  const held = Object.entries(by(live, "ve_store_items", "tier")).map(([tier, items]) => `${counted(items, "item", "items")} in the ${tier} tier`);
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

function show(metrics, times, ready, info) {
  state(ready.status === "ready" ? "ready" : `not ready: ${ready.reason}`, ready.status === "ready" ? "good" : "bad");
  if (!info.models) return; // not loaded yet
  const live = { at_s: Date.now() / 1000, instance: info.instance_id, metrics: parsed(metrics), times };
  remember(live);
  const model = info.models[0];
  const dtype = model.dtype.replace("DTYPE_", "").toLowerCase();
  byId("model").textContent = `${model.name} (${model.family}) on ${info.device}, ${dtype}`;
  const hasPlayground = info.playground_max_bytes > 0;
  byId("drop").hidden = !hasPlayground;
  byId("playground-off").hidden = hasPlayground;
  byId("drop-limit").textContent = `at most ${bytes(info.playground_max_bytes)}; encoded like every request, after those that wait`;
  tiles(live);
  chart("chart-items", ["items_per_s", "encoded_per_s"], (top) => count(top) + "/s");
  chart("chart-latency", ["p50_ms", "p99_ms"], ms);
  chart("chart-busy", ["busy_share"], percent, 1);
  chart("chart-queue", ["queued_ms"], ms);
  panels(live, info);
}

async function refresh() {
  try {
    const after = answers.length ? `?after=${answers.at(-1).times.num_total}` : "";
    const paths = ["metrics", "v1/times" + after, "readyz", "v1/info"];
    const [metrics, times, ready, info] = await Promise.all(paths.map((path) => fetch(path)));
    show(await metrics.text(), await times.json(), await ready.json(), await info.json());
  } catch (error) {
    state("no answer from the service", "bad");
  }
  setTimeout(refresh, document.hidden ? 5000 : 1000);
}

refresh();
