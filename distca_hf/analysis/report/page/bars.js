// Bars: numbers of a table side by side, one row for each, with its name above it.

function barsPicture(table) {
  const values = table.rows.map((row) => row[table.bars]);
  const most = Math.max(...values.filter((value) => value !== null), 0);
  const name = table.columns[table.bars];
  const said = table.note || `${capital(name)} of ${table.rows.length} rows.`;
  function draw(width, palette) {
    const each = 38;
    const svg = canvas(width, each * values.length + 4, `${table.title}: ${table.rows.map((row, index) =>
      `${row[0]} ${cell(values[index])}`).join(", ")}`);
    values.forEach((value, index) => {
      const y = index * each;
      const marked = table.marked.includes(index);
      svg.append(words(0, y + 13, `${table.rows[index][0]}: ${cell(value)}`, palette.text, marked ? { "font-weight": 600 } : {}));
      svg.append(shape("rect", { x: 0, y: y + 18, height: 14, fill: marked ? palette.local : palette.before,
        width: (((value || 0) * (width - 2)) / (most || 1)).toFixed(1) }));
    });
    return svg;
  }
  return picture({ title: table.title, said, draw, columns: table.columns, rows: () => table.rows });
}
