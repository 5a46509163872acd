// Timeline: what the time of one attention call was spent on, of every rank.

const UNDER_WAY = "exchange under way, at most";
const USES = {
  send: "rows are sent off",
  local: "own keys",
  wait: "waiting for arrivals",
  remote: "keys that arrived",
  combine: "merging",
};

function timelinePicture(step) {
  const choose = element("select", { id: "call" }, ...step.calls.map((call, index) =>
    element("option", { value: index }, callName(call))));
  const now = () => step.calls[choose.selectedIndex];
  const called = (call) => call.ranks.map(([rank, spans]) => [rank, sum(spans.map(([, us]) => us)),
    sum(spans.filter(([use]) => use === "wait").map(([, us]) => us))]);
  const sentence = (call) => {
    const ranks = called(call);
    const [rank, us, waited] = ranks.reduce((most, next) => (next[2] > most[2] ? next : most));
    return `${capital(callName(call))}: ${rankName(step, rank)} waits longest, ${duration(waited / 1e6)} of ${duration(us / 1e6)}`;
  };
  const said = "Time within one attention call. Each rank's row begins with its own call: clocks of ranks are not "
    + "compared. While own keys are computed the exchange is under way; waiting begins where rows have not arrived by "
    + `then. Layers in which ranks wait longest are listed first.${step.servers.length ? " An attention server has no own keys." : ""}`;
  function draw(width, palette) {
    const call = now();
    const svg = canvas(width, 10, sentence(call));
    const fills = Object.fromEntries(Object.keys(USES).map((use) => [use, palette[use]]));
    fills.wait = hatched(svg, "waiting", palette.wait, palette.hatch);
    const entries = Object.entries(USES).map(([use, name]) => [name, fills[use]]);
    const top = legend(svg, width, [...entries, [UNDER_WAY, palette.text]], palette);
    saidNow.textContent = `${sentence(call)}.`;
    const [left, each] = [step.servers.length ? 68 : 56, call.ranks.length > 24 ? 13 : 20];
    const most = Math.max(...called(call).map(([, us]) => us));
    const x = (us) => left + (us * (width - left - 4)) / most;
    const bottom = top + each * call.ranks.length;
    for (const tick of ticksUpTo(most, Math.max(2, Math.floor(width / 140)))) {
      svg.append(shape("line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom, stroke: palette.grid }));
      svg.append(words(Math.min(x(tick), width - 26), bottom + 15, duration(tick / 1e6), palette.muted, { "text-anchor": "middle" }));
    }
    call.ranks.forEach(([rank, spans], row) => {
      const y = top + row * each;
      svg.append(words(left - 6, y + each - 4, rankName(step, rank), palette.muted, { "text-anchor": "end", "font-size": each > 15 ? 12 : 10 }));
      let [at, leftAt] = [0, 0];
      for (const [use, us] of spans) {
        const box = shape("rect", { x: x(at).toFixed(1), y: y + 1, width: Math.max(0.3, x(at + us) - x(at)).toFixed(1),
          height: each - 4, fill: fills[use] });
        box.append(shape("title", {}, `${rankName(step, rank)}: ${USES[use]}, ${duration(us / 1e6)}`));
        svg.append(box);
        at += us;
        if (use === "send") leftAt = at;
        if (use === "wait") {
          svg.append(shape("rect", { x: x(leftAt).toFixed(1), y: y + each - 3, height: 2, fill: palette.text,
            width: Math.max(0.3, x(at) - x(leftAt)).toFixed(1) }));
        }
      }
    });
    svg.setAttribute("height", bottom + 22);
    svg.setAttribute("viewBox", `0 0 ${width} ${bottom + 22}`);
    return svg;
  }
  const label = element("p", {}, element("label", { for: "call" }, "Call: "), choose);
  const saidNow = element("p", { "aria-live": "polite" });
  const rows = () => step.calls.flatMap((call) => call.ranks.map(([rank, spans]) => [callName(call), rankLabel(step, rank),
    ...Object.keys(USES).map((use) => sum(spans.filter(([name]) => name === use).map(([, us]) => us)))]));
  const made = picture({ title: "One layer, from within", said, draw, controls: [label, saidNow],
    named: () => sentence(now()),
    columns: ["call", "rank", ...Object.values(USES).map((name) => `${name}, µs`)], rows });
  choose.addEventListener("change", made.again);
  return made;
}

function callName(call) {
  const window = call.window_tokens ? `, window of ${call.window_tokens.toLocaleString("en-US")}` : "";
  return `layer ${call.layer}, ${call.part}${window}`;
}
