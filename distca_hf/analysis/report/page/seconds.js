// Seconds: what a micro-batch took on every rank, next to the prediction.

function secondsPicture(step) {
  const times = step.seconds;
  const measured = times.attention.some((value) => value !== null);
  const predicted = times.predicted_attention.length > 0;
  const parts = measured
    ? [["attention", "attention", "local"], ["waiting", "waiting in attention", "wait"],
      ["exchange", "sending, merging", "send"], ["rest", "all else", "rest"]]
    : [["predicted_attention", "attention, predicted", "local"], ["predicted_rest", "all else, predicted", "rest"]];
  const columns = parts.map(([name]) => times[name]);
  const ranks = columns[0].map((_, rank) => rank);
  const total = ranks.map((rank) => (columns[0][rank] === null ? null : sum(columns.map((column) => column[rank]))));
  const expected = predicted && measured ? ranks.map((rank) => [times.predicted_attention, times.predicted_rest].some(
    (column) => (column[rank] ?? null) === null) ? null : times.predicted_attention[rank] + times.predicted_rest[rank]) : [];
  const known = total.filter((value) => value !== null);
  const longest = total.indexOf(Math.max(...known));
  const comparison = (expected[longest] ?? null) !== null && total[longest] ? ` Predicted with ${times.source}: ${duration(expected[longest])}.` : "";
  const said = `${measured ? "Measured" : `Predicted with ${times.source}, exchanges left out`}: forward and backward of `
    + `one micro-batch, all layers together. It takes longest on ${rankName(step, longest)}, ${duration(total[longest])}.${comparison}`
    + (measured && !predicted ? " Nothing is predicted: there is no profile of this device, or the model is not known." : "")
    + (measured ? " All else holds waiting in collectives of FSDP, ZeRO or DDP, too." : "")
    + (measured && step.servers.length ? " Of an attention server it is the time between its calls." : "")
    + (times.waiting_for_servers.length ? " Seconds of waiting for servers are at most as many: in the same call a rank may wait for others, too." : "");
  function draw(width, palette) {
    const most = 1.08 * Math.max(...known, ...expected.filter((value) => value !== null));
    const svg = canvas(width, 10, said);
    const fills = Object.fromEntries(parts.map(([name, , colour]) => [name, palette[colour]]));
    if (fills.waiting) fills.waiting = hatched(svg, "waited", palette.wait, palette.hatch);
    const entries = parts.map(([name, text]) => [text, fills[name]]);
    const marks = [];
    if (expected.length) {
      marks.push({ name: "predicted", colour: palette.text, values: expected });
      marks.push({ name: "predicted attention", colour: palette.combine, values: times.predicted_attention });
      entries.push(["predicted, in all", palette.text], ["predicted attention", palette.combine]);
    }
    const top = legend(svg, width, entries, palette);
    const height = 240;
    columnsOf(svg, {
      top, width, height, labels: ranks.map((rank) => rankLabel(step, rank)), axis: "rank", most, palette, marks, format: duration,
      stacks: parts.map(([name, text]) => ({ name: text, fill: fills[name], values: times[name] })),
    });
    svg.setAttribute("height", top + height + 4);
    svg.setAttribute("viewBox", `0 0 ${width} ${top + height + 4}`);
    return svg;
  }
  const shown = [...parts.map(([name, text]) => [name, text]),
    ...(expected.length ? [["predicted_attention", "attention, predicted"], ["predicted_rest", "all else, predicted"]] : []),
    ...(times.waiting_for_servers.length ? [["waiting_for_servers", "of the waiting for servers, at most"]] : []),
    ...(measured ? [["step", "until the next micro-batch"]] : [])];
  const rows = () => ranks.map((rank) => [rankLabel(step, rank), ...shown.map(([name]) => duration(times[name][rank] ?? null))]);
  return picture({ title: measured ? "Predicted and measured seconds" : "Predicted seconds", said, draw,
    columns: ["rank", ...shown.map(([, text]) => text)], rows });
}
