// The live half of the page: asks /v1/live every second and draws what it says. No build step, no library.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

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
  const total = live.stages.find((row) => row.stage === "total");
  const level = (share) => (share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "");
  const shown = [
    ["delivered", count(now.items_per_s), "/s"],
    ["encoded", count(now.encoded_per_s), "/s"],
    ["latency p50", ms(total.p50_ms), ""],
    ["latency p99", ms(total.p99_ms), ""],
    ["queue", ms(now.queued_s * 1e3), ""],
    ["patches queued", count(now.queued_patches), ""],
    ["device busy", percent(now.busy_share), ""],
    ["saturation", percent(now.saturation), "", level(now.saturation)],
    ["found in cache", percent(now.hit_share), ""],
    ["turned away", count(now.rejections_per_s), "/s", now.rejections_per_s > 0 ? "bad" : ""],
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
  let from = null;  // where the piece under way begins; seconds without a value are gaps
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

// A round number at or above the largest value, so that the scale does not tremble.
function ceiling(values, least) {
  const most = Math.max(least, ...values.filter((value) => value !== null));
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}

function chart(id, series, names, show, fixed) {
  const box = byId(id);
  const times = series.t_s;
  const span = 120;
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
  fill(
    byId("stages"),
    live.stages.filter((row) => row.count).map((row) => [
      row.stage, count(row.count), ...[row.p50_ms, row.p90_ms, row.p99_ms].map((value) => ms(value)),
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
    ...Object.entries(cache.tiers).filter((entry) => entry[1] || entry[0] !== "shared").map(([tier, value]) => [
      tier === "miss" ? "encoded (miss)" : tier === "in_flight" ? "joined an encode" : `found, ${tier} tier`, count(value),
    ]),
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
  const model = live.model;
  byId("model").textContent = `${model.name} (${model.family}) on ${model.device}, ${model.dtype}; up ${Math.floor(live.uptime_s / 60)} min`;
  byId("playground").hidden = live.playground_max_bytes === 0;
  byId("drop-limit").textContent = `at most ${bytes(live.playground_max_bytes)}; goes the way of every request, at the least priority`;
  tiles(live);
  const series = live.series;
  chart("chart-items", series, ["items_per_s", "encoded_per_s"], (top) => count(top) + "/s");
  chart("chart-latency", series, ["p50_ms", "p99_ms"], ms);
  chart("chart-busy", series, ["busy_share"], percent, 1);
  chart("chart-queue", series, ["queued_ms"], ms);
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
