// Focus, read-outs and the stretch of the timeline that is shown. Everything it says is in the page.
"use strict";
const start = performance.now();
const $ = (selector, of = document) => of.querySelector(selector);
const all = (selector, of = document) => [...of.querySelectorAll(selector)];
const clamp = (it, low, high) => Math.max(low, Math.min(high, it));

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1023.5 && unit + 1 < units.length) { n /= 1024; unit += 1; }
  return `${n.toFixed(unit === 0 || n >= 99.95 ? 0 : n >= 9.995 ? 1 : 2)} ${units[unit]}`;
}
function seconds(it) {
  const [value, unit] = it >= 0.9995 ? [it, "s"] : it >= 0.9995e-3 ? [it * 1e3, "ms"] : [it * 1e6, "µs"];
  return `${value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)} ${unit}`;
}

// Pictures: one box of each can be reached with Tab, arrows go to the next.
function pictures() {
  for (const picture of all("svg.picture")) {
    const cells = all(".cell", picture);
    const card = picture.closest(".card, figure");
    const readout = card && $(".readout, figcaption", card);
    const says = readout && readout.textContent;
    const show = (cell) => {
      if (!readout) return;
      readout.textContent = cell ? cell.getAttribute("aria-label") : says;
      const ranks = cell && cell.dataset.ranks;
      for (const it of cells) it.classList.toggle("same", !!ranks && it !== cell && it.dataset.ranks === ranks);
    };
    const at = (row, column) => cells.find((it) => +it.dataset.row === row && +it.dataset.column === column);
    const rows = Math.max(...cells.map((it) => +it.dataset.row));
    const columns = Math.max(...cells.map((it) => +it.dataset.column));
    picture.addEventListener("mouseover", (event) => { const it = event.target.closest(".cell"); if (it) show(it); });
    picture.addEventListener("mouseleave", () => show(cells.find((it) => it === document.activeElement)));
    picture.addEventListener("focusin", (event) => show(event.target.closest(".cell")));
    picture.addEventListener("focusout", () => show(null));
    picture.addEventListener("keydown", (event) => {
      const now = event.target.closest(".cell");
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      let next = event.key === "Home" ? cells[0] : event.key === "End" ? cells[cells.length - 1] : null;
      if (now && step) {
        let [row, column] = [+now.dataset.row + step[0], +now.dataset.column + step[1]];
        while (!next && row >= 0 && row <= rows && column >= 0 && column <= columns) {
          next = at(row, column);
          row += step[0]; column += step[1];
        }
        event.preventDefault();
      }
      if (!next) return;
      event.preventDefault();
      for (const it of cells) it.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }
}

function memory() {
  const chart = $("#memory-chart");
  if (!chart) return;
  const [plot, readout, cursor] = [$(".plot", chart), $(".readout", chart), $(".cursor", chart)];
  const points = JSON.parse($("script", chart).textContent);
  const names = all(".legend li", chart).map((it) => it.textContent.trim()).reverse().slice(1, -1);
  const peak = plot.dataset.peak === undefined ? 0 : +plot.dataset.peak;
  let now = peak;
  const show = (index) => {
    now = clamp(index, 0, points.length - 1);
    const [what, ...live] = points[now];
    const parts = live.map((it, i) => [it, names[i]]).filter((it) => it[0] > 0).sort((a, b) => b[0] - a[0]);
    const sum = live.reduce((a, b) => a + b, 0);
    readout.textContent = `${what.replaceAll("`", "")} · ${bytes(sum)} live: ${parts.map(([n, name]) => `${bytes(n)} ${name}`).join(", ")}`;
    cursor.hidden = false;
    cursor.style.left = `${(100 * (now + 0.5)) / points.length}%`;
  };
  plot.addEventListener("mousemove", (event) => {
    const box = plot.getBoundingClientRect();
    show(Math.floor(((event.clientX - box.left) / box.width) * points.length));
  });
  plot.addEventListener("focus", () => show(now));
  plot.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 20 : 1;
    const next = { ArrowLeft: now - step, ArrowRight: now + step, Home: 0, End: points.length - 1, PageUp: now - 40, PageDown: now + 40, p: peak, P: peak }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
}

function timeline() {
  const chart = $("#timeline-chart");
  if (!chart) return;
  const data = JSON.parse($("script", chart).textContent);
  const [overview, detail, readout, frame] = [".overview", ".detail", ".readout", ".window"].map((it) => $(it, chart));
  const lanes = data.lanes.map(({ name, spans }) => {
    const list = [];
    for (let i = 0, at = 0; i < spans.length; i += 5) {
      const from = at + spans[i];
      at = from + spans[i + 1];
      const layer = spans[i + 4];
      const text = data.names[spans[i + 3]];
      list.push({ from, to: at, color: spans[i + 2], text: layer < 0 ? text : text.replace("*", layer) });
    }
    return { name, list };
  });
  const waits = [];
  for (let i = 0, at = 0; i < data.waits.length; i += 3) {
    const from = at + data.waits[i];
    at = from + data.waits[i + 1];
    waits.push({ from, to: at, color: -1, text: data.names[data.waits[i + 2]] });
  }
  lanes.push({ name: "waits", list: waits });
  const unit = 1e-7;
  // The first span of a lane that ends behind a time.
  const find = (list, time) => {
    let [low, high] = [0, list.length];
    while (low < high) { const mid = (low + high) >> 1; if (list[mid].to <= time) low = mid + 1; else high = mid; }
    return low;
  };
  const first = lanes[0].list;
  // What is shown at first: some ops of the forward pass, when it is steady.
  const steady = find(first, data.length * 0.2);
  let from = first.length ? first[Math.min(steady, first.length - 1)].from : 0;
  let to = first.length ? first[Math.min(steady + 22, first.length - 1)].to : data.length;
  let [lane, at] = [0, -1];
  const least = 20;

  function draw() {
    const width = Math.max(detail.clientWidth, 200), left = $(".lane svg", overview).getBoundingClientRect().left - overview.getBoundingClientRect().left, high = 22, top = 18;
    const scale = (width - left) / (to - from);
    const x = (time) => left + (time - from) * scale;
    const escape = (it) => it.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
    const parts = [];
    let tick = 10 ** Math.floor(Math.log10((to - from) / 4));
    if ((to - from) / tick > 12) tick *= 5; else if ((to - from) / tick > 6) tick *= 2;
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      const px = x(t).toFixed(1);
      parts.push(`<line class="rule" x1="${px}" x2="${px}" y1="${top}" y2="${top + high * lanes.length}"/><text class="axis" x="${px}" y="12" text-anchor="middle">${seconds(t * unit)}</text>`);
    }
    lanes.forEach(({ name, list }, i) => {
      const y = top + i * high, room = Math.floor((left - 6) / 5.6);
      parts.push(`<text class="axis" x="${left - 6}" y="${y + 14}" text-anchor="end">${escape(name.length > room ? name.slice(0, room - 1) + "…" : name)}</text>`);
      let drawn = -1;
      for (let k = find(list, from); k < list.length && list[k].from < to; k++) {
        const it = list[k];
        const [a, b] = [Math.max(x(it.from), left), Math.min(x(it.to), width)];
        const now = i === lane && k === at;
        // What is narrower than half a pixel is drawn with its neighbour.
        if (b - drawn < 0.5 && !now) continue;
        drawn = b;
        parts.push(`<rect class="${it.color < 0 ? "exposed" : `t${it.color}`}${now ? " now" : ""}" data-lane="${i}" data-at="${k}" x="${a.toFixed(1)}" y="${y + 1}" width="${Math.max(b - a - (b - a > 3 ? 0.6 : 0), 0.5).toFixed(1)}" height="${high - 3}"/>`);
        const [op, name = "", more = ""] = it.text.split(" ");
        const tail = name.split(".").slice(-2).join(".");
        const text = [it.text, `${op} ${tail} ${more}`, `${op} ${tail}`, more ? op : tail, op].find((text) => text.length * 6.3 + 8 < b - a);
        if (text) parts.push(`<text class="on" x="${(a + 4).toFixed(1)}" y="${y + 14}">${escape(text)}</text>`);
      }
    });
    const height = top + high * lanes.length + 2;
    detail.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}" aria-hidden="true">${parts.join("")}</svg>`;
    const box = overview.getBoundingClientRect(), strip = $(".lane svg", overview).getBoundingClientRect();
    frame.hidden = false;
    frame.style.left = `${strip.left - box.left + (from / data.length) * strip.width}px`;
    frame.style.width = `${((to - from) / data.length) * strip.width}px`;
  }
  function say(it) {
    readout.textContent = it
      ? `${lanes[it.lane].name} · ${lanes[it.lane].list[it.at].text} · ${seconds((lanes[it.lane].list[it.at].to - lanes[it.lane].list[it.at].from) * unit)} from ${seconds(lanes[it.lane].list[it.at].from * unit)}`
      : `${seconds((to - from) * unit)} from ${seconds(from * unit)}`;
  }
  function move(newFrom, newLength) {
    const length = clamp(newLength, least, data.length);
    from = clamp(newFrom, 0, data.length - length);
    to = from + length;
    draw();
  }
  const zoom = (factor, around = (from + to) / 2) => move(around - (around - from) * factor, (to - from) * factor);
  function select(newLane, index) {
    const list = lanes[newLane].list;
    if (!list.length) return;
    [lane, at] = [newLane, clamp(index, 0, list.length - 1)];
    const it = list[at];
    if (it.from < from || it.to > to) move((it.from + it.to) / 2 - (to - from) / 2, to - from);
    else draw();
    say({ lane, at });
  }
  overview.addEventListener("keydown", (event) => {
    const step = (to - from) * (event.shiftKey ? 1 : 0.25);
    const act = {
      ArrowLeft: () => move(from - step, to - from), ArrowRight: () => move(from + step, to - from),
      Home: () => move(0, to - from), End: () => move(data.length, to - from),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => move(0, data.length),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
    say(null);
  });
  detail.addEventListener("focus", () => { if (at < 0) select(0, find(first, from)); });
  detail.addEventListener("keydown", (event) => {
    const other = (by) => {
      let next = lane + by;
      while (lanes[next] && !lanes[next].list.length) next += by;
      if (lanes[next]) select(next, find(lanes[next].list, lanes[lane].list[at].from));
    };
    const around = at < 0 ? undefined : lanes[lane].list[at].from;
    const act = {
      ArrowLeft: () => select(lane, at - 1), ArrowRight: () => select(lane, at + 1),
      ArrowUp: () => other(-1), ArrowDown: () => other(1), Home: () => select(lane, 0), End: () => select(lane, Infinity),
      "+": () => zoom(0.5, around), "=": () => zoom(0.5, around), "-": () => zoom(2, around),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  detail.addEventListener("mousemove", (event) => {
    const it = event.target.dataset;
    if (it && it.at !== undefined) say({ lane: +it.lane, at: +it.at });
  });
  detail.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8);
  }, { passive: false });
  const timeAt = (event) => {
    const strip = $(".lane svg", overview).getBoundingClientRect();
    return clamp((event.clientX - strip.left) / strip.width, 0, 1) * data.length;
  };
  let grabbed = null;
  overview.addEventListener("pointerdown", (event) => { grabbed = timeAt(event); overview.setPointerCapture(event.pointerId); });
  overview.addEventListener("pointermove", (event) => {
    if (grabbed === null) return;
    const time = timeAt(event);
    if (Math.abs(time - grabbed) > data.length / 400) { move(Math.min(time, grabbed), Math.abs(time - grabbed)); say(null); }
  });
  overview.addEventListener("pointerup", (event) => {
    if (grabbed !== null && Math.abs(timeAt(event) - grabbed) <= data.length / 400) { move(grabbed - (to - from) / 2, to - from); say(null); }
    grabbed = null;
  });
  addEventListener("resize", draw);
  move(from, to - from);
}

// Which section is being read; and a box that the address names is shown.
function places() {
  const links = new Map(all("nav a").map((it) => [it.hash.slice(1), it]));
  const observer = new IntersectionObserver((entries) => {
    for (const it of entries.filter((it) => it.isIntersecting)) {
      for (const [id, link] of links) id === it.target.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }
  }, { rootMargin: "0px 0px -70% 0px" });
  for (const it of all("h2")) observer.observe(it);
  const named = () => { const it = location.hash && document.getElementById(location.hash.slice(1)); if (it && it.classList.contains("cell")) { it.scrollIntoView({ block: "center" }); it.focus(); } };
  addEventListener("hashchange", named);
  named();
}

pictures();
memory();
timeline();
places();
performance.measure("script", { start, end: performance.now() });
