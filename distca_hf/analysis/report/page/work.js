// Work: attention work of every rank over the mean, before and after.

function workPicture(step) {
  const overMean = (work) => {
    const mean = sum(work) / work.length;
    return work.map((value) => (mean ? value / mean : 0));
  };
  const [before, after] = [overMean(step.work_before), overMean(step.work)];
  const labels = (work) => work.map((_, rank) => rankLabel(step, rank));
  const busiest = (work) => work.indexOf(Math.max(...work));
  const said = `Attended pairs of each rank over the mean of all. With ${step.before} rank ${busiest(before)} has `
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
  const rows = () => step.work.map((_, rank) => [labels(step.work)[rank], step.tokens[rank] ?? null,
    before[rank] ?? null, after[rank]]);
  return picture({ title: "Work of each rank", said, draw,
    columns: ["rank", "tokens", `${step.before}, over the mean`, `${step.after}, over the mean`], rows });
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
