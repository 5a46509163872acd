// Work: attention work, or the work of a step, of every rank over the mean, before and after.

function attentionPicture(step) {
  return workPicture(step, "Work of each rank", "Attended pairs", step.work_before, step.work);
}

function stepPicture(step) {
  return workPicture(step, "Work of each rank in a step", "Operations (layers, attention, head and loss)",
    step.step_work_before, step.step_work);
}

function workPicture(step, title, what, workBefore, work) {
  const overMean = (work) => {
    const mean = sum(work) / work.length;
    return work.map((value) => (mean ? value / mean : 0));
  };
  const [before, after] = [overMean(workBefore), overMean(work)];
  const labels = (work) => work.map((_, rank) => rankLabel(step, rank));
  const busiest = (work) => work.indexOf(Math.max(...work));
  const said = `${what} of each rank over the mean of all. With ${step.before} rank ${busiest(before)} has `
    + `${ratio(Math.max(...before))} times the mean. ${capital(step.after)}: `
    + `${rankName(step, busiest(after))} has ${ratio(Math.max(...after))} times.`;
  function draw(width, palette) {
    const most = 1.08 * Math.max(1.2, ...before, ...after);
    const height = 170;
    const svg = canvas(width, 2 * (height + 30), said);
    [[step.before, before, palette.before], [step.after, after, palette.local]].forEach(([name, work, colour], panel) => {
      const top = panel * (height + 30);
      svg.append(words(0, top + 13, capital(name), palette.text, { "font-weight": 600 }));
      const fill = (rank) => (work[rank] > 1.05 && rank === busiest(work) ? palette.busiest : colour);
      columnsOf(svg, {
        top: top + 24, width, height, labels: labels(work), axis: "rank", most, palette,
        stacks: [{ name, fill, values: work }], lines: [{ value: 1, text: "mean" }],
        format: (value) => value.toFixed(1),
      });
    });
    return svg;
  }
  const rows = () => work.map((_, rank) => [labels(work)[rank], step.tokens[rank] ?? null,
    before[rank] ?? null, after[rank]]);
  return picture({ title, said, draw,
    columns: ["rank", "tokens", `${step.before}, over the mean`, `${step.after}, over the mean`], rows });
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
