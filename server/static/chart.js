// A small line chart: one or two curves over the last two minutes, as SVG.

const POINTS = 120;
const SPACE = "http://www.w3.org/2000/svg";

export class Chart {
  /** `curves`: one or two {label, value(sample)}; a value of null leaves a gap. */
  constructor(parent, title, unit, curves) {
    this.title = title;
    this.unit = unit;
    this.curves = curves;
    this.samples = [];
    const figure = document.createElement("figure");
    this.svg = document.createElementNS(SPACE, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 100`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.svg.append(element("line", { class: "grid", x1: 0, x2: POINTS - 1, y1: 99, y2: 99 }));
    this.paths = curves.map((_, place) => element("path", { class: place ? "two" : "one" }));
    this.svg.append(...this.paths);
    const caption = document.createElement("figcaption");
    this.keys = curves.map((_, place) => {
      const key = document.createElement("span");
      key.className = place ? "key-two" : "key-one";
      return key;
    });
    caption.append(`${title}${unit ? `, ${unit}` : ""}`, ...this.keys);
    figure.append(caption, this.svg);
    parent.append(figure);
  }

  add(sample) {
    this.samples = [...this.samples, this.curves.map((curve) => curve.value(sample))].slice(-POINTS);
    const top = Math.max(...this.samples.flat().filter((value) => value !== null), 0) || 1;
    const first = POINTS - this.samples.length;
    this.paths.forEach((path, curve) => {
      let pen = "M";
      const steps = this.samples.map((values, place) => {
        const value = values[curve];
        if (value === null) {
          pen = "M";
          return "";
        }
        const step = `${pen}${first + place} ${(99 - (94 * value) / top).toFixed(2)}`;
        pen = "L";
        return step;
      });
      path.setAttribute("d", steps.join(""));
    });
    const latest = this.samples.at(-1).map((value) => (value === null ? "–" : shown(value)));
    this.keys.forEach((key, curve) => (key.textContent = `${this.curves[curve].label} ${latest[curve]}`));
    const told = this.curves.map((curve, place) => `${curve.label} ${latest[place]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${told}; highest of the last two minutes ${shown(top)} ${this.unit}`);
  }
}

/** An SVG element. */
export function element(name, attributes) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function shown(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
