// Numbers and text for people, and the few elements that are made by script.

const $ = id => document.getElementById(id);
const number = (value, places = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
const short = value => {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return size >= 100 ? value.toFixed(0) : `${+value.toPrecision(3)}`;
};
const percent = value => `${(value * 100).toFixed(2)} %`;
const lasting = seconds => {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
};
const text = (element, value) => {
  if (element.textContent !== value) element.textContent = value;
};
const make = (name, content = "", kind = "") => {
  const element = document.createElement(name);
  element.textContent = content;
  if (kind) element.className = kind;
  return element;
};
const final = state => state !== "running" && state !== "paused";
