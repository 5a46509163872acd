// Matrix: who sends how much to whom in the forward pass of one layer.

function matrixPicture(step) {
  const nodes = step.nodes_sent;
  const one = nodes ? "node" : "rank";
  // Attention servers come after the ranks, or after the nodes.
  const rankAt = (at) => (nodes ? step.num_ranks + at - nodes : at);
  const name = (at) => (at < nodes ? `node ${at}` : rankName(step, rankAt(at)));
  const label = (at) => (at < nodes ? `${at}` : rankLabel(step, rankAt(at)));
  const numServers = step.work.length - step.num_ranks;
  const size = (nodes || step.num_ranks) + numServers;
  const pairs = nodes ? size * size - numServers : size * (size - 1) || 1; // ranks of a node send to each other
  const total = sum(step.sent.map(([, , value]) => value));
  const most = Math.max(0, ...step.sent.map(([, , value]) => value));
  const largest = step.sent.find(([, , value]) => value === most);
  const said = step.sent.length === 0 ? `No ${one} sends anything: no document is cut.`
    : `${bytes(total)} are sent in the forward pass of one layer, keys and values first of all. Most of it from `
      + `${name(largest[0])} to ${name(largest[1])}: ${bytes(most)}. ${step.sent.length} of ${pairs} pairs `
      + "exchange something.";
  function draw(width, palette) {
    const [left, above] = [44, 40];
    const side = Math.min(width - left - 4, 560, 72 * size);
    const each = side / size;
    const svg = canvas(width, above + side + 40, said);
    const servers = numServers ? "   s: attention server" : "";
    svg.append(words(0, 12, `sending ${one} ↓   receiving ${one} →${servers}`, palette.muted));
    svg.append(shape("rect", { x: left, y: above, width: side, height: side, fill: "none", stroke: palette.grid }));
    const every = Math.ceil((size * 22) / side);
    const first = size - numServers; // of the servers, which keep their names where numbers are left out
    for (let at = 0; at < size; at += 1) {
      if (at < first ? at % every || (numServers && first - at < every && at) : (at - first) % every) continue;
      const middle = (at + 0.5) * each;
      const short = label(at).replace("server ", "s");
      svg.append(words(left + middle, above - 6, short, palette.muted, { "text-anchor": "middle" }));
      svg.append(words(left - 6, above + middle + 4, short, palette.muted, { "text-anchor": "end" }));
    }
    for (const [from, to, value] of step.sent) {
      const box = shape("rect", {
        x: (left + to * each).toFixed(1), y: (above + from * each).toFixed(1),
        width: Math.max(1, each - 0.5).toFixed(1), height: Math.max(1, each - 0.5).toFixed(1),
        fill: palette.local, "fill-opacity": (0.12 + (0.88 * value) / most).toFixed(2),
      });
      box.append(shape("title", {}, `${name(from)} to ${name(to)}: ${bytes(value)}`));
      svg.append(box);
    }
    const y = above + side + 16;
    for (let part = 0; part <= 10; part += 1) {
      const opacity = (0.12 + 0.088 * part).toFixed(2);
      svg.append(shape("rect", { x: left + part * 10, y, width: 10, height: 12, fill: palette.local, "fill-opacity": opacity }));
    }
    svg.append(words(left + 118, y + 11, `up to ${bytes(most)}`, palette.muted));
    return svg;
  }
  const rows = () => [...step.sent].sort((a, b) => b[2] - a[2]).map(([from, to, value]) => [label(from), label(to), bytes(value)]);
  return picture({ title: "Who sends how much to whom", said, draw, columns: [`from ${one}`, `to ${one}`, "sent"], rows });
}
