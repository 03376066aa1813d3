// The text of a step, and how one moves.

class View extends Pictures {
  constructor(recording) {
    super();
    this.recording = recording;
    this.i = 0;
    this.g = 0;
    this.request = -1;
    this.position = null;
    this.findingSteps = page.finding_steps.map(([step]) => step - page.first);
    this.eventSteps = Object.keys(page.events).map(Number).sort((a, b) => a - b);
  }

  start() {
    $("slider").max = this.recording.length - 1;
    $("slider").addEventListener("input", () => this.go(Number($("slider").value)));
    $("step").addEventListener("change", () => this.go(Number($("step").value) - page.first));
    $("first").addEventListener("click", () => this.go(0));
    $("back").addEventListener("click", () => this.go(this.i - 1));
    $("forward").addEventListener("click", () => this.go(this.i + 1));
    $("last").addEventListener("click", () => this.go(this.recording.length - 1));
    $("next-finding").addEventListener("click", () => this.next(this.findingSteps));
    $("next-event").addEventListener("click", () => this.next(this.eventSteps));
    $("next-finding").disabled = !this.findingSteps.length;
    $("next-event").disabled = !this.eventSteps.length;
    $("timeline").addEventListener("click", (event) =>
      this.go(Math.floor((event.offsetX / $("timeline").clientWidth) * this.recording.length)));
    $("request").addEventListener("change", () => this.choose(Number($("request").value)));
    $("position").addEventListener("input", () => {
      this.position = $("position").value === "" ? null : Number($("position").value);
      this.showSlots();
    });
    $("block").addEventListener("input", () => this.showOwners());
    $("history").addEventListener("click", () => this.showHistory());
    $("grid").addEventListener("mousemove", (event) => this.point(event, false));
    $("grid").addEventListener("click", (event) => this.point(event, true));
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("click", (event) => {
      if (event.target.dataset.step) this.go(Number(event.target.dataset.step) - page.first);
    });
    window.addEventListener("hashchange", () => this.fromHash());
    window.addEventListener("resize", () => this.draw());
    window.addEventListener("beforeprint", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    $("groups").replaceChildren(...page.groups.map((group, g) => {
      const chip = element("button", groupName(g), { role: "tab" });
      chip.addEventListener("click", () => { this.g = g; this.show(); });
      return chip;
    }));
    $("bar").hidden = $("content").hidden = false;
    this.i = this.findingSteps[0] ?? 0;
    this.fromHash();
  }

  fromHash() {
    const hash = new URLSearchParams(location.hash.slice(1));
    const number = (name, low, high, otherwise) => {
      const value = Number(hash.get(name) ?? otherwise);
      return Number.isInteger(value) ? Math.min(Math.max(value, low), high) : otherwise;
    };
    const last = page.first + this.recording.length - 1;
    this.go(number("step", page.first, last, page.first + this.i) - page.first);
    if (!hash.has("group") && !hash.has("request")) return;
    this.g = number("group", 0, G - 1, this.g);
    this.request = number("request", -1, 2 ** 31, this.request);
    this.show();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (["INPUT", "SELECT"].includes(event.target.tagName) && event.target.id !== "slider") return;
    const last = this.recording.length - 1;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -last, End: last };
    if (by[event.key]) this.go(this.i + by[event.key]);
    else if (event.key === "n") this.next(this.findingSteps);
    else if (event.key === "p") this.next(this.findingSteps, -1);
    else if (event.key === "e") this.next(this.eventSteps);
    else return;
    event.preventDefault();
  }

  next(steps, direction = 1) {
    if (!steps.length) return;
    const ahead = steps.filter((step) => (step - this.i) * direction > 0);
    const around = direction > 0 ? steps[0] : steps.at(-1);
    this.go(ahead.length ? (direction > 0 ? ahead[0] : ahead.at(-1)) : around);
  }

  go(i) {
    if (!Number.isFinite(i)) return;
    this.i = Math.min(Math.max(Math.round(i), 0), this.recording.length - 1);
    this.position = null;
    this.arrived = true;
    this.show();
  }

  choose(request) {
    this.request = request;
    this.position = null;
    this.show();
  }

  show() {
    this.entries = this.recording.entries(this.i);
    this.state = this.recording.at(this.i);
    this.findings = page.findings.filter((finding) => finding.step === page.first + this.i);
    if (this.arrived) this.lookAtFinding();
    if (!this.entries.some(({ request }) => request === this.request)) {
      this.request = this.entries[0]?.request ?? -1;
    }
    this.showStep();
    this.showGroup();
    this.showSlots();
    this.showOwners();
    this.draw();
    const hash = `#step=${page.first + this.i}&group=${this.g}&request=${this.request}`;
    if (location.hash !== hash) history.replaceState(null, "", hash);
  }

  // A step with findings shows the group, the request and the block of the first that names one.
  lookAtFinding() {
    const first = (key) => this.findings.find((finding) => finding[key] >= 0)?.[key];
    if (!this.findings.some(({ group }) => group === this.g)) this.g = first("group") ?? this.g;
    const entry = this.entries.find(({ row }) => row === first("row"));
    this.request = entry?.request ?? this.request;
    $("block").value = first("block") ?? $("block").value;
    this.arrived = false;
  }

  showStep() {
    const [i, last] = [page.first + this.i, page.first + this.recording.length - 1];
    $("slider").value = this.i;
    $("slider").setAttribute("aria-valuetext", `step ${i}`);
    $("step").value = i;
    $("of").textContent = `of ${page.first} … ${last}`;
    $("step-title").textContent = i;
    $("summary").textContent = `${plural(this.entries.length, "request")}, ` +
      `${plural(this.recording.tokens(this.i), "token")}, ` +
      `${plural(this.recording.appends(this.i).length, "append")}`;
    const count = page.finding_steps.find(([step]) => step === i)?.[1] ?? 0;
    const lines = this.findings.map((finding) => {
      const request = finding.row < 0 ? -1 : this.recording.owner(finding.row, this.i);
      const whose = request < 0 ? "" : ` (row ${finding.row}: request ${request})`;
      const line = element("li", finding.text + whose);
      line.append(element("small", page.meanings[finding.kind]));
      return line;
    });
    const left = count - lines.length;
    if (left > 0) lines.push(element("li", `… and ${left} more in this step`));
    $("step-findings").replaceChildren(...lines);
    list($("changes"), this.changes(), "nothing but the positions");
    const rows = this.entries.map(({ row, request, first, count: n }) => ({
      cells: [request, row, n ? range(first, first + n - 1) : "none", n],
      chosen: request === this.request,
      value: request,
    }));
    const head = ["request", "row", "positions", "tokens"];
    $("batch").replaceChildren(table(head, rows, (request) => this.choose(request)));
  }

  changes() {
    const texts = [...(page.events[this.i] ?? [])];
    const requests = (entries) => new Set(entries.map(({ request }) => request));
    const before = requests(this.i ? this.recording.entries(this.i - 1) : []);
    const now = requests(this.entries);
    const joined = [...now].filter((request) => !before.has(request));
    const left = [...before].filter((request) => !now.has(request));
    if (this.i && joined.length) texts.push(`joins the batch: request ${joined.join(", ")}`);
    if (left.length) texts.push(`is not in the batch any more: request ${left.join(", ")}`);
    this.recording.appends(this.i).forEach(({ row, overwrite, ids }, index) => {
      const named = ids.map((blocks, g) => blocks.length && `${groupName(g)} ${some(blocks, 6)}`);
      const blocks = named.filter(Boolean).join("; ") || "no block";
      const stood = index < page.rows_before && this.i === 0;
      const verb = stood ? "stood before this page begins:" : overwrite ? "starts anew:" : "gets";
      const request = this.recording.owner(row, this.i);
      texts.push(`row ${row}${request < 0 ? "" : ` (request ${request})`} ${verb} ${blocks}`);
    });
    return texts;
  }

  showGroup() {
    const group = page.groups[this.g];
    const [K, B] = [group.block_size, group.kernel_block_size];
    const parts = [`group ${this.g} of ${G}, ${group.kind}`, `K = ${K} tokens a block`];
    if (B !== K) parts.push(`B = ${B} a column`);
    if (group.sliding_window_reach) parts.push(`reads ${group.sliding_window_reach} tokens back`);
    parts.push(group.prefix_cacheable ? "blocks may be shared" : "blocks are never shared");
    $("group-facts").textContent = parts.join(" · ");
    [...$("groups").children].forEach((chip, g) => {
      chip.setAttribute("aria-selected", `${g === this.g}`);
      chip.classList.toggle("bad", this.findings.some((finding) => finding.group === g));
    });
  }

  showSlots() {
    const requests = this.entries.map(({ request }) =>
      element("option", `${request}`, { value: request, selected: request === this.request }));
    $("request").replaceChildren(...requests);
    const entry = this.entries.find(({ request }) => request === this.request);
    $("slots").replaceChildren();
    $("derivation").textContent = "";
    if (!entry) return;
    const rows = [];
    for (let g = 0; g < G; g++) {
      const runs = this.runs(g, entry);
      for (const run of runs.slice(0, MAX_LINES)) {
        const { first, last, slot, block, why } = run;
        const slots = slot < 0 ? "PAD" : range(slot, slot + last - first);
        rows.push({ cells: [groupName(g), range(first, last), block, slots, why] });
      }
      const left = runs.length - MAX_LINES;
      if (left > 0) rows.push({ cells: [groupName(g), `… ${left} more`, "", "", ""] });
    }
    $("slots").replaceChildren(table(["group", "positions", "block", "slots", ""], rows));
    const position = this.position ?? entry.first + Math.max(entry.count - 1, 0);
    if ($("position") !== document.activeElement) $("position").value = position;
    const row = this.state.rows[this.g * R + entry.row];
    const token = mapToken(this.g, row, position);
    $("derivation").textContent = [
      `group ${this.g} (${groupName(this.g)}), request ${entry.request} in row ${entry.row}, ` +
        `position ${position}`,
      `the row has filled ${row.length} blocks: ${some(row)}`,
      ...token.lines,
      token.why ? `slot = ${token.slot < 0 ? "PAD" : token.slot}: ${token.why}` : "",
    ].filter(Boolean).join("\n");
  }

  runs(g, entry) {
    const row = this.state.rows[g * R + entry.row];
    const runs = [];
    for (let position = entry.first; position < entry.first + entry.count; position++) {
      const { slot, why, column } = mapToken(g, row, position);
      const run = runs.at(-1);
      const same = run && run.why === why && run.column === column;
      const follows = same && slot === (slot < 0 ? run.slot : run.slot + position - run.first);
      if (follows) {
        run.last = position;
      } else {
        const block = row[column] ?? "none";
        runs.push({ first: position, last: position, slot, why, column, block });
      }
    }
    return runs;
  }

  showOwners() {
    const block = Number($("block").value);
    const say = (text) => list($("owners"), [], text);
    if ($("block").value === "") return say("Type a block's number, or click on a cell.");
    if (block === 0) return say("Block 0 is the null block, which no request owns.");
    const rows = this.recording.holders(this.i, this.g, block);
    const texts = rows.map((row) => `request ${this.recording.owner(row, this.i)} in row ${row}`);
    for (let g = 0; g < G; g++) {
      if (g === this.g) continue;
      for (const row of this.recording.holders(this.i, g, block)) {
        const request = this.recording.owner(row, this.i);
        texts.push(`request ${request} in row ${row}, in another group: ${groupName(g)}`);
      }
    }
    list($("owners"), texts, `No live request holds block ${block} in this step.`);
  }

  showHistory() {
    if ($("block").value === "") return this.showOwners();
    const spans = this.recording.history(this.g, Number($("block").value));
    const texts = spans.map(({ row, request, first, last }) =>
      `steps ${range(page.first + first, page.first + last)}: request ${request} in row ${row}`);
    list($("owners"), texts, "Nobody, in any step.");
  }
}

unpack().then((arrays) => {
  const view = new View(new Recording(arrays));
  if (view.recording.length) view.start();
}).catch((error) => {
  const text = `The tables cannot be shown: ${error}`;
  document.querySelector("header").append(element("p", text, { className: "bad-text" }));
});
