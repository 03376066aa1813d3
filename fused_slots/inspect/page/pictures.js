// The pictures: steps over time, and one group's table. `View` says what they show.

class Pictures {
  draw() {
    this.drawTimeline();
    this.drawGrid();
  }

  // A canvas sized in CSS pixels, and the colours of the page.
  canvas(id, width, height) {
    const node = $(id);
    const scale = window.devicePixelRatio || 1;
    [node.width, node.height] = [width * scale, height * scale];
    [node.style.width, node.style.height] = [`${width}px`, `${height}px`];
    const context = node.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    return [context, (name) => style.getPropertyValue(`--${name}`).trim()];
  }

  drawTimeline() {
    const [width, height, steps] = [$("bar").clientWidth, 34, this.recording.length];
    const [context, colour] = this.canvas("timeline", width, height);
    const x = (step) => (step / steps) * width;
    const bar = Math.max(width / steps, 1);
    let most = 1;
    for (let i = 0; i < steps; i++) most = Math.max(most, this.recording.tokens(i));
    context.fillStyle = colour("line");
    for (let i = 0; i < steps; i++) {
      const tall = (this.recording.tokens(i) / most) * (height - 6);
      context.fillRect(x(i), height - 6 - tall, bar, tall);
    }
    context.fillStyle = colour("event");
    for (const step of this.eventSteps) context.fillRect(x(step), height - 4, Math.max(bar, 2), 4);
    context.fillStyle = colour("bad");
    for (const step of this.findingSteps) {
      context.fillRect(x(step), 0, Math.max(bar, 2), height - 6);
    }
    context.fillStyle = colour("ink");
    context.fillRect(x(this.i + 0.5) - 1, 0, 2, height);
  }

  drawGrid() {
    const live = this.recording.live(this.i);
    const marks = this.marks(live);
    const chosen = (row) => this.recording.owner(row, this.i) === this.request;
    const rank = (row) => (marks.badRows.has(row) ? 0 : chosen(row) ? 1 : 2);
    this.shown = live.sort((a, b) => rank(a) - rank(b) || a - b).slice(0, MAX_ROWS);
    const blocksOf = (row) => this.state.rows[this.g * R + row];
    const columns = Math.max(1, ...this.shown.map((row) => blocksOf(row).length));
    const label = 150;
    const room = Math.max($("grid").parentElement.clientWidth - label - 8, 200);
    const perCell = Math.ceil(columns / Math.floor(room / 3));
    const wide = Math.min(Math.floor(room / Math.ceil(columns / perCell)), 46);
    const tall = 22;
    const top = 18;
    const width = label + Math.ceil(columns / perCell) * wide;
    this.geometry = { label, wide, tall, top, perCell };
    const height = top + this.shown.length * tall + 1;
    const [context, colour] = this.canvas("grid", Math.max(width, label + 200), height);
    context.font = "11px ui-monospace, monospace";
    context.textBaseline = "middle";
    context.fillStyle = colour("soft");
    const every = Math.max(1, Math.ceil(40 / wide)) * perCell;
    for (let column = 0; column < columns; column += every) {
      context.fillText(`${column}`, label + (column / perCell) * wide + 2, top / 2);
    }
    this.shown.forEach((row, line) => this.drawRow(context, colour, row, top + line * tall, marks));
    const notes = [
      live.length > this.shown.length && `the first ${MAX_ROWS} of ${live.length} rows are drawn`,
      perCell > 1 && `each cell stands for ${perCell} blocks, and shows the worst of them`,
      live.length > this.entries.length && "pale rows have a live request that is not scheduled",
    ].filter(Boolean);
    $("grid-note").textContent = notes.length ? `Of this picture: ${notes.join("; ")}.` : "";
  }

  // What the rows' cells are: how many live rows hold a block, what is bad, new and written.
  marks(live) {
    const holders = new Map();
    for (const row of live) {
      const { ids, n } = this.state.held[this.g * R + row];
      for (const block of new Set(ids.subarray(0, n))) {
        holders.set(block, (holders.get(block) ?? 0) + 1);
      }
    }
    const [badBlocks, badCells, badRows] = [new Set(), new Set(), new Set()];
    for (const { row, group, column, block } of this.findings) {
      if (group >= 0 && group !== this.g && block < 0) continue;
      if (block >= 0) badBlocks.add(block);
      if (column >= 0 && group === this.g) badCells.add(`${row}/${column}`);
      if (row >= 0) badRows.add(row);
    }
    for (const row of live) {
      const { ids, n } = this.state.held[this.g * R + row];
      if (ids.subarray(0, n).some((block) => badBlocks.has(block))) badRows.add(row);
    }
    const fresh = new Map();
    for (const { row, overwrite, ids } of this.recording.appends(this.i)) {
      fresh.set(row, overwrite ? Infinity : (fresh.get(row) ?? 0) + ids[this.g].length);
    }
    const span = ({ row, first, count }) => [row, written(this.g, first, count)];
    const writes = new Map(this.entries.map(span));
    return { holders, badBlocks, badCells, badRows, fresh, writes };
  }

  drawRow(context, colour, row, y, marks) {
    const { label, wide, tall, perCell } = this.geometry;
    const request = this.recording.owner(row, this.i);
    const blocks = this.state.rows[this.g * R + row];
    const { ids, n } = this.state.held[this.g * R + row];
    const waits = !marks.writes.has(row);
    context.globalAlpha = waits ? 0.45 : 1;
    const plain = request === this.request ? "ink" : "soft";
    context.fillStyle = colour(marks.badRows.has(row) ? "bad" : plain);
    context.font = `${request === this.request ? "bold " : ""}11px ui-monospace, monospace`;
    context.fillText(`req ${request} · row ${row}`, 2, y + tall / 2, label - 8);
    context.font = "11px ui-monospace, monospace";
    const hue = 40 + ((request * 0.618034) % 1) * 280; // red is for findings
    const [from, to] = marks.writes.get(row) ?? [0, -1];
    const firstFresh = blocks.length - (marks.fresh.get(row) ?? 0);
    for (let begin = 0; begin < blocks.length; begin += perCell) {
      const end = Math.min(begin + perCell, blocks.length);
      let [worst, write] = [0, false];
      for (let column = begin; column < end; column++) {
        const block = blocks[column];
        const gone = block === 0 || column >= n || ids[column] === 0;
        const bad =
          marks.badCells.has(`${row}/${column}`) || (!gone && marks.badBlocks.has(block));
        worst = Math.max(worst, bad ? 4 : gone ? 1 : marks.holders.get(block) > 1 ? 3 : 2);
        write ||= from <= column && column <= to;
      }
      const x = label + (begin / perCell) * wide;
      const gap = wide > 6 ? 1 : 0;
      const lightness = colour(worst === 3 ? "shared-lightness" : "lightness");
      const own = `hsl(${hue} 60% ${lightness})`;
      context.fillStyle = worst === 4 ? colour("bad") : worst === 1 ? colour("freed") : own;
      context.fillRect(x, y + 1, wide - gap, tall - 2);
      if (end > firstFresh && wide > 6) {
        context.fillStyle = colour("event");
        context.beginPath();
        context.moveTo(x, y + 1);
        context.lineTo(x + 7, y + 1);
        context.lineTo(x, y + 8);
        context.fill();
      }
      if (write) {
        context.fillStyle = colour("write");
        context.fillRect(x, y + tall - 5, wide - gap, 3);
      }
      if (perCell === 1 && wide >= 30) {
        context.fillStyle = worst === 4 ? colour("paper") : colour("cell-ink");
        context.fillText(`${blocks[begin]}`, x + 7, y + tall / 2, wide - 9);
      }
    }
    context.globalAlpha = 1;
  }

  point(event, choose) {
    const { label, wide, tall, top, perCell } = this.geometry;
    const row = this.shown[Math.floor((event.offsetY - top) / tall)];
    if (row === undefined || event.offsetY < top) return;
    const request = this.recording.owner(row, this.i);
    const blocks = this.state.rows[this.g * R + row];
    const column = Math.floor((event.offsetX - label) / wide) * perCell;
    if (choose) this.choose(request);
    if (event.offsetX < label || column >= blocks.length) {
      const count = plural(blocks.length, "block");
      $("cell").textContent = `row ${row}, request ${request}: ${count} ${some(blocks)}`;
      return;
    }
    const block = blocks[column];
    if (choose) {
      $("block").value = block;
      this.showOwners();
    }
    const { ids, n } = this.state.held[this.g * R + row];
    const held = column < n && (ids[column] ? `block ${ids[column]}` : "nothing (freed)");
    const rows = block ? this.recording.holders(this.i, this.g, block) : [];
    const others = rows.filter((other) => other !== row).slice(0, 8);
    const requests = others.map((other) => this.recording.owner(other, this.i)).join(", ");
    $("cell").textContent =
      `row ${row}, request ${request}, block ${column} of ${blocks.length}: the table has block ` +
      `${block}, the KV manager holds ${held || "nothing"}` +
      (requests && `; held too by request ${requests}`);
  }
}
