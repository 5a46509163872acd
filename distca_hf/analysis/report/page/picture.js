// Picture: a figure with its words, its table, and a button that saves it.

let drawn = []; // pictures, to be drawn again when width or colours change

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function tableOf(title, columns, rows) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = element("tbody", {}, ...rows.map((row) =>
    element("tr", {}, ...row.map((value) => element("td", {}, cell(value))))));
  const caption = { role: "region", "aria-label": title, tabindex: "0", class: "table" };
  return element("div", caption, element("table", {}, element("thead", {}, head), body));
}

// Large tables are made when they are opened.
function folded(title, columns, rows) {
  const made = element("details", {}, element("summary", {}, `${title} as a table`));
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(tableOf(title, columns, rows()));
  });
  return made;
}

// title: heading. said: the picture in words. draw(width, palette): its SVG. columns, rows(): the same as a table.
// named(): title of a saved picture, where it is another one.
function picture({ title, said, draw, columns, rows, controls = [], named = () => title }) {
  const place = element("div", { class: "drawing" });
  const save = element("button", { type: "button" }, "Save as PNG");
  save.addEventListener("click", () => savePNG(place.firstElementChild, named()));
  const again = () => {
    const width = Math.max(240, Math.floor(place.clientWidth));
    place.replaceChildren(draw(width, colours()));
  };
  const figure = element("figure", {}, element("figcaption", {}, said), ...controls, place,
    element("div", { class: "tools" }, save, folded(title, columns, rows)));
  drawn.push({ place, again });
  return { section: element("section", {}, element("h2", {}, title), figure), again };
}

// A picture as a file: its SVG on a canvas of twice the size, below its title.
async function savePNG(svg, title) {
  const blob = await pngOf(svg, title);
  const link = element("a", { href: URL.createObjectURL(blob), download: `${title.toLowerCase().replace(/\W+/g, "-")}.png` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function pngOf(svg, title) {
  const [width, height, above, scale] = [svg.width.baseVal.value, svg.height.baseVal.value, 32, 2];
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
  await image.decode();
  const surface = element("canvas", { width: scale * (width + 16), height: scale * (height + above + 8) });
  const pen = surface.getContext("2d");
  const palette = colours();
  pen.scale(scale, scale);
  pen.fillStyle = palette.page;
  pen.fillRect(0, 0, width + 16, height + above + 8);
  pen.fillStyle = palette.text;
  pen.font = `600 15px ${FONT}`;
  pen.fillText(title, 8, 21);
  pen.drawImage(image, 8, above, width, height);
  return new Promise((resolve) => surface.toBlob(resolve, "image/png"));
}
