// Memory: of every rank, or of ways to train, in parts.

function memoryPicture(step) {
  const bars = step.memory;
  const names = [...new Set(bars.flatMap((bar) => bar.parts.map(([name]) => name)))];
  const of = (bar, name) => (bar.parts.find(([part]) => part === name) || [name, 0])[1];
  const totals = bars.map((bar) => sum(bar.parts.map(([, value]) => value)));
  const fullest = totals.indexOf(Math.max(...totals));
  const limit = Math.max(...bars.map((bar) => bar.limit_bytes));
  const said = `${capital(bars[fullest].label)} needs most: ${gib(of(bars[fullest], names[0]) && totals[fullest])} of `
    + `${gib(limit)}.`;
  const few = bars.length <= 4;
  const labels = bars.map((bar) => (few ? bar.label : bar.label.replace("rank ", "")));
  function draw(width, palette) {
    const cycle = [palette.local, palette.remote, palette.send, palette.combine, palette.before, palette.rest];
    const svg = canvas(width, 10, said);
    const top = legend(svg, width, names.map((name, index) => [name, cycle[index % cycle.length]]), palette);
    const height = 220;
    const most = 1.1 * Math.max(...totals, limit < 4 * Math.max(...totals) ? limit : 0);
    columnsOf(svg, {
      top, width, height, labels, axis: few ? "" : "rank", most, unit: 2 ** 30, palette, format: gib,
      stacks: names.map((name, index) => ({ name, fill: cycle[index % cycle.length], values: bars.map((bar) => of(bar, name)) })),
      lines: limit && limit <= most ? [{ value: limit, text: `there are ${gib(limit)}` }] : [],
    });
    svg.setAttribute("height", top + height + 4);
    svg.setAttribute("viewBox", `0 0 ${width} ${top + height + 4}`);
    return svg;
  }
  const rows = () => bars.map((bar) => [bar.label, ...names.map((name) => gib(of(bar, name))), gib(bar.limit_bytes)]);
  return picture({ title: "Memory", said, draw, columns: ["", ...names, "there are"], rows });
}
