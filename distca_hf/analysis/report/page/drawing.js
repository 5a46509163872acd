// Drawing: parts of SVG pictures. Colours are written into them, so that a picture can be saved by itself.

const NAMESPACE = "http://www.w3.org/2000/svg";
const LETTER = 12; // size of text, in pixels
const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

function colours() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${String(name)}`).trim() });
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function words(x, y, text, colour, more = {}) {
  return shape("text", { x, y, fill: colour, "font-size": LETTER, "font-family": FONT, ...more }, text);
}

function canvas(width, height, label) {
  return shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

// Lines across a colour, for what must not be told by colour alone.
function hatched(svg, id, background, lines) {
  const size = { width: 6, height: 6 };
  svg.append(shape("pattern", { id, ...size, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    shape("rect", { ...size, fill: background }),
    shape("rect", { width: 1.5, height: 6, fill: lines })));
  return `url(#${id})`;
}

// A legend in as many lines as it needs; returns the height below it.
function legend(svg, width, entries, palette) {
  let x = 0;
  let y = 0;
  for (const [name, fill] of entries) {
    const wide = 22 + 6.8 * name.length;
    if (x > 0 && x + wide > width) [x, y] = [0, y + 18];
    svg.append(shape("rect", { x, y: y + 2, width: 12, height: 12, fill, stroke: palette.grid }));
    svg.append(words(x + 17, y + 12, name, palette.text));
    x += wide + 10;
  }
  return y + 26;
}
