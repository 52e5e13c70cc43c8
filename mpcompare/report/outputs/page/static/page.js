// The page is complete without this script. It adds sorting, links that open a check, buttons that copy, and curves
// with one cursor over all of them.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // Sorting: numbers by data-key, words by their letters; cells without a number come last.
  function sort(table, place, heading) {
    const descending = heading.getAttribute("aria-sort") === "ascending";
    const cells = (row) => row.cells[place];
    const key = (row) => (cells(row).dataset.key === undefined ? null : Number(cells(row).dataset.key));
    const rows = all("tbody tr", table);
    const numeric = rows.some((row) => key(row) !== null);
    const order = (a, b) => {
      if (!numeric) return cells(a).textContent.localeCompare(cells(b).textContent) * (descending ? -1 : 1);
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (x - y) * (descending ? -1 : 1);
    };
    table.tBodies[0].append(...rows.sort(order));
    all("th", table).forEach((each) => each.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  }
  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((heading, place) => {
      const button = make("button", { type: "button", title: "Sort by this column" }, ...heading.childNodes);
      button.addEventListener("click", () => sort(table, place, heading));
      heading.append(button);
    });
  }

  // Links to checks: open everything around the target, and show it.
  function fragment() {
    try {
      return decodeURIComponent(location.hash.slice(1));
    } catch {
      return ""; // a broken escape
    }
  }
  function reveal() {
    const target = document.getElementById(fragment());
    if (!target) return;
    const switches = target.closest(".only")?.querySelector(".switch input");
    if (switches && target.closest(".same")) switches.checked = false;
    for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    target.scrollIntoView({ block: "center" });
  }
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link && link.hash === location.hash) reveal();
  });
  reveal();

  // Copies: of all verdicts, and of each check once it is unfolded.
  function copy(text, button) {
    const old = () => {
      const area = document.body.appendChild(make("textarea", { value: text }));
      area.select();
      document.execCommand("copy");
      area.remove();
    };
    const done = () => (button.textContent = "Copied");
    (navigator.clipboard ? navigator.clipboard.writeText(text).catch(old) : Promise.resolve(old())).then(done);
  }
  for (const button of all("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button.parentElement.querySelector("pre").textContent, button));
  }
  const plain = (text) => text.trim().replace(/\s+/g, " ").replace(/([\\`*_{}[\]<>|#~&])/g, "\\$1");
  document.addEventListener("toggle", (event) => {
    const check = event.target;
    if (!check.open || !check.id.startsWith("check=") || check.querySelector("button")) return;
    const text = check.querySelector("p");
    const [name, , ratio] = [...check.querySelector("summary").children].map((each) => plain(each.textContent));
    const run = plain(check.closest(".run").querySelector("strong").textContent);
    const numbers = plain(text.textContent.replace(/\s*Link$/, ""));
    const button = make("button", { type: "button", textContent: "Copy as Markdown" });
    button.addEventListener("click", () => copy(`**${run}**, ${name}: ${ratio} of its limit. ${numbers}`, button));
    text.append(" ", button);
  }, true);

  // Curves
  const few = (_, ticks) => ticks.map((tick, place) => (place % Math.ceil(ticks.length / 8) ? null : tick));
  const theme = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);
  const AXIS = { stroke: theme("--text"), grid: { stroke: theme("--raised"), filter: few }, ticks: { stroke: theme("--rule"), filter: few } };
  const STEPS = [1, 2, 5].flatMap((digit) => [...Array(8).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
  const digits = (value) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(6))));
  const label = (tick) => (tick === null ? "" : digits(tick));
  const SCALES = { difference: { distr: 3, log: 10 }, loss: {}, loss_scale: { distr: 3, log: 2 }, grad_norm: { distr: 3, log: 10 } };

  function curves(box, part) {
    if (!part.steps.length) return;
    box.hidden = false;
    const card = box.appendChild(make("div", { className: "card" }));
    const plots = [];
    const slider = make("input", { type: "range", min: 0, max: part.steps.length - 1, value: 0, ariaLabel: "Step" });
    const cells = part.runs.map(() => Object.keys(part.panels).map(() => make("td", { className: "right" })));
    const head = make("th", { scope: "col" });

    function read(index) {
      head.textContent = `step ${part.steps[index]}`;
      slider.value = index;
      slider.ariaValueText = head.textContent;
      part.runs.forEach((run, row) =>
        Object.keys(part.panels).forEach((name, column) => (cells[row][column].textContent = digits(run[name][index]))));
    }
    for (const [name, title] of Object.entries(part.panels)) {
      const logarithmic = SCALES[name].distr === 3;
      const series = part.runs.map((run) => ({
        label: run.label, show: run[name].some((value) => value !== null), stroke: run.colour === "#000000" ? theme("--text") : run.colour, width: 2, dash: run.dash.map((length) => 2 * length), spanGaps: name === "grad_norm",
      }));
      const values = part.runs.map((run) => run[name].map((value) => (logarithmic && !(value > 0) ? null : value)));
      const plot = new uPlot({
        width: card.clientWidth - 16, height: 220, title, legend: { show: false },
        cursor: { sync: { key: box.dataset.place }, focus: { prox: 16 } },
        scales: { x: { time: false }, y: SCALES[name] },
        axes: [{ ...AXIS, incrs: STEPS }, { ...AXIS, size: 80, filter: few, values: (_, ticks) => ticks.map(label) }],
        series: [{ label: "step" }, ...series],
        hooks: { setCursor: [(each) => each.cursor.idx !== null && each.cursor.idx !== undefined && read(each.cursor.idx)] },
      }, [part.steps, ...values], card);
      plots.push(plot);
    }
    slider.addEventListener("input", () => {
      const index = Number(slider.value);
      read(index);
      for (const plot of plots) plot.setCursor({ left: plot.valToPos(part.steps[index], "x"), top: 1 }, false);
    });
    const rows = part.runs.map((run, row) => {
      const swatch = make("span", { className: "swatch", ariaHidden: true });
      const length = run.dash.map((each) => 2 * each);
      const colour = run.colour === "#000000" ? "currentColor" : run.colour;
      swatch.innerHTML = `<svg width="48" height="4"><path d="M0 2H48" stroke="${colour}" stroke-width="3" stroke-dasharray="${length.join(" ")}"/></svg>`;
      return make("tr", {}, make("th", { scope: "row" }, swatch, run.label), ...cells[row]);
    });
    const titles = Object.values(part.panels).map((title) => make("th", { scope: "col", className: "right" }, title));
    const table = make("table", {}, make("thead", {}, make("tr", {}, head, ...titles)), make("tbody", {}, ...rows));
    card.append(slider, make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Numbers of the step" }, table));
    read(part.steps.length - 1);
    new ResizeObserver(() => plots.forEach((plot) => plot.setSize({ width: card.clientWidth - 16, height: 220 }))).observe(card);
    if (part.every > 1) card.append(make("p", {}, `Every ${part.every}. step is drawn.`));
  }
  const parts = JSON.parse(document.getElementById("numbers").textContent);
  all(".curves").forEach((box) => curves(box, parts[box.dataset.place]));
})();
