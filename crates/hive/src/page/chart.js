// A line chart on a canvas. It draws when told to, at most once a frame, and says in words what it
// shows, for those who cannot see it.

const styles = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Steps of 1, 2 or 5 times a power of ten, about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(step => step * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-6; at += 1) found.push(at * step);
  return found;
}

class Chart {
  constructor(id, name, format) {
    this.canvas = document.getElementById(id);
    this.name = name;
    this.format = format;
    this.series = [];
    this.xFormat = String;
    this.cursor = null;
    this.log = false;
    this.end = 1;
    const canvas = this.canvas;
    const move = event => {
      this.cursor = event.offsetX;
      requestFrame("charts");
    };
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerdown", move);
    for (const leave of ["pointerleave", "blur"]) {
      canvas.addEventListener(leave, () => { this.cursor = null; requestFrame("charts"); });
    }
    canvas.addEventListener("keydown", event => {
      const width = canvas.clientWidth;
      const steps = { ArrowLeft: -width / 50, ArrowRight: width / 50, Home: -width, End: width };
      if (event.key === "Escape") this.cursor = null;
      else if (event.key in steps) {
        this.cursor = Math.min(width, Math.max(0, (this.cursor ?? width) + steps[event.key]));
        this.say();
        event.preventDefault();
      } else return;
      requestFrame("charts");
    });
    new ResizeObserver(() => requestFrame("charts")).observe(canvas);
  }

  /** Series of `{name, colour, xs, ys, faint, dots}`, from 0 to `end`. */
  show(series, end, xFormat) {
    this.series = series.filter(one => one.xs.length > 0);
    this.end = end;
    this.xFormat = xFormat;
    this.canvas.dataset.points = series.reduce((sum, one) => sum + (one.faint ? 0 : one.xs.length), 0);
  }

  draw() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (width === 0) return;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    const [soft, line] = [styles("--soft"), styles("--line")];
    const frame = { left: 46, right: width - 8, top: 6, bottom: height - 18 };
    if (this.series.length === 0) {
      context.fillStyle = soft;
      context.textAlign = "center";
      context.fillText("nothing yet", width / 2, height / 2);
      return;
    }
    const [left, right] = [0, this.end];
    const place = this.log ? value => Math.log10(Math.max(value, 1e-9)) : value => value;
    let [low, high] = [Infinity, -Infinity];
    for (const { ys } of this.series) {
      for (const value of ys) {
        const at = place(value);
        if (at < low) low = at;
        if (at > high) high = at;
      }
    }
    const room = (high - low) * 0.06 || Math.max(Math.abs(high) * 0.05, 0.01);
    low = low >= 0 && !this.log ? Math.max(0, low - room) : low - room;
    high += room;
    const x = value => frame.left + (value - left) / (right - left) * (frame.right - frame.left);
    const y = value => frame.bottom - (place(value) - low) / (high - low) * (frame.bottom - frame.top);
    Object.assign(this, { frame, left, right });

    context.lineWidth = 1;
    context.fillStyle = soft;
    context.strokeStyle = line;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.beginPath();
    const marks = ticks(low, high, 4).map(at => this.log ? 10 ** at : at);
    for (const at of marks) {
      context.moveTo(frame.left, Math.round(y(at)) + 0.5);
      context.lineTo(frame.right, Math.round(y(at)) + 0.5);
      context.fillText(this.format(at), frame.left - 6, y(at));
    }
    context.stroke();
    context.textBaseline = "top";
    context.textAlign = "center";
    for (const at of ticks(left, right, Math.max(2, width / 110))) {
      const text = this.xFormat(at);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(width - half - 2, Math.max(half, x(at))), frame.bottom + 5);
    }
    for (const { xs, ys, colour, faint, dots } of this.series) {
      context.strokeStyle = context.fillStyle = styles(colour);
      context.globalAlpha = faint ? 0.28 : 1;
      context.lineWidth = faint ? 1 : 1.8;
      context.lineJoin = "round";
      context.beginPath();
      for (let at = 0; at < xs.length; at += 1) context.lineTo(x(xs[at]), y(ys[at]));
      context.stroke();
      if (dots && xs.length <= 60) {
        context.beginPath();
        for (let at = 0; at < xs.length; at += 1) {
          context.moveTo(x(xs[at]) + 3, y(ys[at]));
          context.arc(x(xs[at]), y(ys[at]), 3, 0, 7);
        }
        context.fill();
      }
      context.globalAlpha = 1;
    }
    if (this.cursor !== null) this.drawCursor(context, width, x, y);
  }

  /** What the series are at the cursor: the nearest point of each. */
  atCursor() {
    if (this.cursor === null || !this.frame) return [];
    const { left, right, frame } = this;
    const at = left + (this.cursor - frame.left) / (frame.right - frame.left) * (right - left);
    return this.series.filter(one => !one.faint).map(one => {
      let [low, high] = [0, one.xs.length - 1];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (one.xs[middle] < at) low = middle + 1; else high = middle;
      }
      if (low > 0 && at - one.xs[low - 1] < one.xs[low] - at) low -= 1;
      return { ...one, x: one.xs[low], y: one.ys[low] };
    });
  }

  drawCursor(context, width, x, y) {
    const found = this.atCursor();
    if (found.length === 0) return;
    const at = x(found[0].x);
    context.strokeStyle = styles("--soft");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(at, this.frame.top);
    context.lineTo(at, this.frame.bottom);
    context.stroke();
    const lines = [this.xFormat(found[0].x), ...found.map(one => `${one.name}  ${this.format(one.y)}`)];
    const box = Math.max(...lines.map(text => context.measureText(text).width)) + 16;
    const start = at + 10 + box > width ? at - 10 - box : at + 10;
    context.fillStyle = styles("--card");
    context.strokeStyle = styles("--line");
    context.beginPath();
    context.roundRect(start, this.frame.top, box, lines.length * 16 + 8, 5);
    context.fill();
    context.stroke();
    context.textAlign = "left";
    lines.forEach((text, row) => {
      context.fillStyle = row === 0 ? styles("--soft") : styles(found[row - 1].colour);
      context.fillText(text, start + 8, this.frame.top + 6 + row * 16);
    });
    for (const one of found) {
      context.fillStyle = styles(one.colour);
      context.beginPath();
      context.arc(x(one.x), y(one.y), 3.5, 0, 7);
      context.fill();
    }
  }

  /** The chart in words. */
  say() {
    const parts = this.series.filter(one => !one.faint).map(({ name, xs, ys }) => {
      const [low, high] = [Math.min(...ys), Math.max(...ys)].map(this.format);
      const last = xs.length - 1;
      return `${name}: now ${this.format(ys[last])} at ${this.xFormat(xs[last])}, from ${low} to ${high}`;
    });
    const here = this.atCursor().map(one => `${one.name} ${this.format(one.y)} at ${this.xFormat(one.x)}`);
    const text = here.length > 0 ? here.join("; ") : parts.join("; ") || "nothing yet";
    this.canvas.setAttribute("aria-label", `${this.name}. ${text}.`);
  }
}
