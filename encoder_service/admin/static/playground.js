// The playground: sends one file as POST /v1/encode takes it and draws the answer, which has pictures instead of rows.

import { TIERS, bars, bytes, element, fill, ms } from "./live.js";

const byId = (id) => document.getElementById(id);
let shown = null;

function drawPicture() {
  const { result, image } = shown;
  const canvas = byId("picture");
  const context = canvas.getContext("2d");
  // Drawn at the size at which it is shown, so that lines of one pixel remain visible.
  const scale = Math.min(1, 900 / Math.max(result.target_width, result.target_height));
  canvas.width = Math.round(result.target_width * scale);
  canvas.height = Math.round(result.target_height * scale);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  if (!byId("show-grid").checked) return;
  const [, rows, columns] = result.grid_thw;
  // Thin lines between patches, strong ones between visual tokens.
  const lines = (step, style) => {
    context.beginPath();
    for (let column = 0; column <= columns; column += step) {
      const x = Math.round((column * canvas.width) / columns) + (column === columns ? -0.5 : 0.5);
      context.moveTo(x, 0);
      context.lineTo(x, canvas.height);
    }
    for (let row = 0; row <= rows; row += step) {
      const y = Math.round((row * canvas.height) / rows) + (row === rows ? -0.5 : 0.5);
      context.moveTo(0, y);
      context.lineTo(canvas.width, y);
    }
    context.strokeStyle = style;
    context.stroke();
  };
  context.lineWidth = 1;
  lines(1, "rgba(255,255,255,.28)");
  lines(result.merge_size, "rgba(20,30,60,.55)");
}

function drawColours() {
  const { result } = shown;
  const canvas = byId("colours");
  byId("colour-note").textContent = result.colours ? "by principal components" : "too many to show";
  canvas.hidden = !result.colours;
  if (!result.colours) return;
  const { width, height, rgb } = result.colours;
  const raw = Uint8Array.from(atob(rgb), (letter) => letter.charCodeAt(0));
  const pixels = new ImageData(width, height);
  for (let index = 0; index < width * height; index += 1) {
    pixels.data.set(raw.subarray(3 * index, 3 * index + 3), 4 * index);
    pixels.data[4 * index + 3] = 255;
  }
  const small = new OffscreenCanvas(width, height);
  small.getContext("2d").putImageData(pixels, 0, 0);
  canvas.width = byId("picture").width;
  canvas.height = byId("picture").height;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
}

function drawFacts() {
  const { result, file } = shown;
  const [frames, rows, columns] = result.grid_thw;
  fill(byId("facts"), [
    ["file", `${file.name}, ${bytes(file.size)}`],
    ["answered", element("span", TIERS[result.tier], "badge")],
    ["target size", `${result.target_width} × ${result.target_height} px`],
    ["patch grid", `${frames} × ${rows} × ${columns} of ${result.patch_size} px = ${result.num_patches} patches`],
    ["visual tokens", `${result.num_rows} (${result.merge_size} × ${result.merge_size} patches each)`],
    ["rows", `${result.num_rows} × ${result.width} ${result.dtype}, ${bytes(result.rows_bytes)}`],
    ["deepstack levels", String(result.num_deepstack_levels)],
    ["key", result.key.slice(0, 16) + "…"],
  ]);
  const stages = Object.entries(result.timings).filter((entry) => entry[1] > 0);
  bars(byId("timings"), stages.map(([name, value]) => [name.replace("_ms", ""), value]), ms);
}

function problem(text) {
  byId("play-error").textContent = text;
  byId("play-error").hidden = !text;
}

async function send(file) {
  problem("");
  byId("result").hidden = true; // of the file before
  byId("drop").classList.remove("over");
  const form = new FormData();
  form.append("image", file, file.name);
  try {
    const answer = await fetch("v1/playground", { method: "POST", headers: { "X-Timeout-S": "30" }, body: form });
    const { items, error } = await answer.json();
    if (error) return problem(`${file.name}: ${error.reason}: ${error.message}`);
    const [result] = items;
    const image = new Image();
    image.src = result.picture;
    await image.decode();
    shown = { result, image, file };
    byId("result").hidden = false;
    drawPicture();
    drawColours();
    drawFacts();
  } catch (error) {
    problem("the service did not answer");
  }
}

const drop = byId("drop");
drop.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) send(event.dataTransfer.files[0]);
});
byId("file").addEventListener("change", (event) => {
  if (event.target.files.length) send(event.target.files[0]);
  // Reset, so that choosing the same file again also fires a change event.
  event.target.value = "";
});
byId("show-grid").addEventListener("change", drawPicture);
