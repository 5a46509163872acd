// Columns: one for each rank, of stacked parts; with marks to compare with, and lines across all of them.

// stacks: {name, fill, values}; marks: {name, colour, values}; lines: {value, text}.
// unit: ticks are round in it.
function columnsOf(svg, { top, width, height, labels, axis, stacks, marks = [], lines = [], most, unit = 1, format, palette }) {
  const [left, below] = [66, 34];
  const [wide, high] = [Math.min(width - left - 4, 120 * labels.length), height - below];
  const x = (index) => left + (index * wide) / labels.length;
  const y = (value) => top + high - (value * high) / (most || 1);
  for (const tick of ticksUpTo(most / unit, 4).map((value) => value * unit)) {
    svg.append(shape("line", { x1: left, x2: width, y1: y(tick), y2: y(tick), stroke: palette.grid }));
    svg.append(words(left - 6, y(tick) + 4, format(tick), palette.muted, { "text-anchor": "end" }));
  }
  const gap = wide / labels.length > 5 ? 1.5 : 0;
  const base = labels.map(() => 0);
  for (const { fill, values } of stacks) {
    const boxes = {}; // one shape for each colour, however many ranks there are
    values.forEach((value, index) => {
      if (!value) return;
      const own = typeof fill === "function" ? fill(index) : fill;
      const [from, to] = [y(base[index]), y(base[index] + value)];
      const box = `M${x(index).toFixed(1)} ${from.toFixed(1)}H${(x(index + 1) - gap).toFixed(1)}V${to.toFixed(1)}H${x(index).toFixed(1)}Z`;
      (boxes[own] = boxes[own] || []).push(box);
      base[index] += value;
    });
    for (const [own, paths] of Object.entries(boxes)) svg.append(shape("path", { d: paths.join(""), fill: own }));
  }
  for (const { colour, values } of marks) {
    const d = values.map((value, index) => value === null ? "" :
      `M${x(index).toFixed(1)} ${y(value).toFixed(1)}H${(x(index + 1) - gap).toFixed(1)}`).join("");
    svg.append(shape("path", { d, stroke: colour, "stroke-width": 2.5, fill: "none" }));
  }
  for (const { value, text } of lines) {
    svg.append(shape("line", { x1: left, x2: width, y1: y(value), y2: y(value), stroke: palette.text, "stroke-dasharray": "4 3" }));
    svg.append(words(width - 4, y(value) - 5, text, palette.text,
      { "text-anchor": "end", stroke: palette.page, "stroke-width": 3, "paint-order": "stroke" }));
  }
  const labelWidth = 7.2 * Math.max(...labels.map((label) => label.length)) + 8; // with room between two of them
  const every = Math.max(1, Math.ceil((labels.length * labelWidth) / wide));
  labels.forEach((label, index) => {
    if (index % every) return;
    const middle = (x(index) + x(index + 1) - gap) / 2;
    svg.append(words(middle, top + high + 15, label, palette.muted, { "text-anchor": "middle" }));
  });
  svg.append(words(left + wide / 2, top + high + 30, axis, palette.muted, { "text-anchor": "middle" }));
}
