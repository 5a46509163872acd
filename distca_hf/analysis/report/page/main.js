// Main: builds the page of one step, and another when one is chosen.

const report = JSON.parse(document.getElementById("figures").textContent);
const main = document.getElementById("main");
const shown = element("div", { "aria-live": "polite" });

function showStep(step) {
  const facts = step.facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  const pictures = [attentionPicture(step), ...(step.step_work.length ? [stepPicture(step)] : []), matrixPicture(step)];
  if (step.calls.length) pictures.push(timelinePicture(step));
  if (step.seconds) pictures.push(secondsPicture(step));
  if (step.memory.length) pictures.push(memoryPicture(step));
  shown.replaceChildren(
    element("ul", { class: "findings" }, ...step.findings.map((sentence) => element("li", {}, sentence))),
    element("dl", { class: "facts" }, ...facts),
    ...pictures.map(({ section }) => section),
  );
  drawAll();
}

function drawAll() {
  drawn = drawn.filter(({ place }) => place.isConnected); // others were of another step
  for (const { again } of drawn) again();
}

function stepsBar() {
  const choose = element("select", { id: "step" }, ...report.steps.map((step, index) =>
    element("option", { value: index }, step.label)));
  const [back, on] = ["Previous", "Next"].map((name) => element("button", { type: "button" }, name));
  const go = (index) => {
    choose.selectedIndex = index;
    back.disabled = index === 0;
    on.disabled = index === report.steps.length - 1;
    showStep(report.steps[index]);
  };
  choose.addEventListener("change", () => go(choose.selectedIndex));
  back.addEventListener("click", () => go(choose.selectedIndex - 1));
  on.addEventListener("click", () => go(choose.selectedIndex + 1));
  return [element("nav", { class: "steps", "aria-label": "Steps" },
    element("label", { for: "step" }, "Step"), choose, back, on), () => go(report.begin_with)];
}

if (report.steps.length) {
  const [bar, begin] = stepsBar();
  main.append(bar, shown);
  begin();
}
for (const table of report.tables) {
  main.append(table.bars !== null ? barsPicture(table).section : element("section", {}, element("h2", {}, table.title),
    tableOf(table.title, table.columns, table.rows), element("p", {}, table.note)));
}
drawAll();
performance.mark("drawn");
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawAll);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
