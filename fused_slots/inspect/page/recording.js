"use strict";
// A recording's arrays, decoded as recording/schedule.py does, and what one looks at in them. Text
// of the recording is only ever set as text.
const page = JSON.parse(document.getElementById("page-data").textContent);
const G = page.groups.length;
const R = page.max_num_reqs;
const MAX_ROWS = 400;
const MAX_LINES = 60;
const CHECKPOINT = 50;
const NOTHING = new Int32Array(0);
const $ = (id) => document.getElementById(id);

function element(tag, text = "", properties = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  return Object.assign(node, properties);
}

function list(node, texts, none) {
  const lines = texts.slice(0, MAX_LINES).map((text) => element("li", text));
  const left = texts.length - lines.length;
  if (left) lines.push(element("li", `… and ${left} more`));
  node.replaceChildren(...(texts.length ? lines : [element("li", none)]));
}

function table(head, rows, onClick) {
  const node = element("table");
  node.append(element("tr"));
  node.rows[0].append(...head.map((text) => element("th", text)));
  for (const { cells, chosen, value } of rows) {
    const line = element("tr", "", { className: chosen ? "chosen" : "" });
    line.append(...cells.map((text) => element("td", text, { className: "number" })));
    if (onClick) line.addEventListener("click", () => onClick(value));
    node.append(line);
  }
  return node;
}

function some(ids, n = 12) {
  if (ids.length <= n) return `[${ids.join(", ")}]`;
  const [head, tail] = [ids.subarray(0, n / 2), ids.subarray(ids.length - n / 2)];
  return `[${head.join(", ")}, … ${tail.join(", ")}] (${ids.length})`;
}

const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const range = (a, b) => (a === b ? `${a}` : `${a} … ${b}`);
const groupName = (g) => page.groups[g].name || `group ${g}`;

async function unpack() {
  const text = atob($("page-arrays").textContent);
  const packed = Uint8Array.from(text, (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const values = new Int32Array(await new Response(stream).arrayBuffer());
  const arrays = {};
  let begin = 0;
  for (const [name, length] of page.lengths) {
    arrays[name] = values.subarray(begin, (begin += length));
  }
  return arrays;
}

function ends(counts) {
  const sums = new Float64Array(counts.length + 1);
  counts.forEach((count, i) => (sums[i + 1] = sums[i] + count));
  return sums;
}

class Recording {
  constructor(arrays) {
    this.a = arrays;
    this.length = arrays.step_entries.length;
    this.entryEnds = ends(arrays.step_entries);
    this.appendEnds = ends(arrays.step_appends);
    this.editEnds = ends(arrays.truth_edits);
    this.blockEnds = ends(arrays.append_counts);
    this.tokenEnds = ends(arrays.num_scheduled);
    const [rows, held] = [Array(G * R).fill(NOTHING), Array(G * R).fill({ ids: NOTHING, n: 0 })];
    this.checkpoints = [{ next: 0, rows, held }];
    this.state = this.checkpoints[0];
    this.lives = this.findLives();
  }

  entries(i) {
    const entries = [];
    for (let e = this.entryEnds[i]; e < this.entryEnds[i + 1]; e++) {
      const [row, request] = [this.a.rows[e], this.a.request_ids[e]];
      const [first, count] = [this.a.num_computed[e], this.a.num_scheduled[e]];
      entries.push({ row, request, first, count });
    }
    return entries;
  }

  appends(i) {
    const appends = [];
    for (let p = this.appendEnds[i]; p < this.appendEnds[i + 1]; p++) {
      const ids = page.groups.map((_, g) =>
        this.a.append_blocks.subarray(this.blockEnds[p * G + g], this.blockEnds[p * G + g + 1]));
      appends.push({ row: this.a.append_rows[p], overwrite: this.a.append_overwrite[p], ids });
    }
    return appends;
  }

  tokens(i) {
    return this.tokenEnds[this.entryEnds[i + 1]] - this.tokenEnds[this.entryEnds[i]];
  }

  // Rows as they stand in step i: what the appends built, and what the KV manager holds.
  at(i) {
    const reached = [...this.checkpoints, this.state].filter(({ next }) => next <= i + 1);
    this.state = reached.reduce((best, state) => (state.next > best.next ? state : best));
    let { next, rows, held } = this.state;
    [rows, held] = [rows.slice(), held.slice()];
    for (; next <= i; next++) {
      if (next === this.checkpoints.length * CHECKPOINT) {
        this.checkpoints.push({ next, rows: rows.slice(), held: held.slice() });
      }
      this.apply(next, rows, held);
    }
    this.state = { next, rows, held };
    return this.state;
  }

  // Rows and lists are replaced, never changed: checkpoints share them.
  apply(i, rows, held) {
    for (const { row, overwrite, ids } of this.appends(i)) {
      ids.forEach((blocks, g) => {
        const cell = g * R + row;
        if (overwrite || !rows[cell].length) {
          rows[cell] = blocks;
        } else if (blocks.length) {
          const longer = new Int32Array(rows[cell].length + blocks.length);
          longer.set(rows[cell]);
          longer.set(blocks, rows[cell].length);
          rows[cell] = longer;
        }
      });
    }
    for (let e = this.entryEnds[i]; e < this.entryEnds[i + 1]; e++) {
      for (let g = 0; g < G; g++) {
        const k = e * G + g;
        const cell = g * R + this.a.rows[e];
        const n = this.a.truth_blocks[k];
        let { ids } = held[cell];
        if (this.editEnds[k] < this.editEnds[k + 1] || ids.length < n) {
          const edited = new Int32Array(Math.max(n, ids.length));
          edited.set(ids);
          for (let d = this.editEnds[k]; d < this.editEnds[k + 1]; d++) {
            edited[this.a.edit_columns[d]] = this.a.edit_blocks[d];
          }
          ids = edited;
        }
        if (ids !== held[cell].ids || n !== held[cell].n) held[cell] = { ids, n };
      }
    }
  }

  // Per row the requests that it belonged to, from the first to the last step that scheduled them.
  findLives() {
    const lives = Array.from({ length: R }, () => []);
    for (let i = 0; i < this.length; i++) {
      const gone = new Set((page.events[i] || []).map((text) =>
        /^(?:finished|preempted|aborted) (\d{1,10})$/.exec(text)?.[1]));
      if (gone.size) {
        const last = lives.map((ofRow) => ofRow.at(-1)).filter(Boolean);
        for (const life of last) life.over ||= gone.has(`${life.request}`);
      }
      for (const { row, request } of this.entries(i)) {
        const life = lives[row].at(-1);
        if (life && !life.over && life.request === request) life.last = i;
        else lives[row].push({ request, first: i, last: i, over: false });
      }
    }
    return lives;
  }

  owner(row, i) {
    return this.lives[row].find((life) => life.first <= i && i <= life.last)?.request ?? -1;
  }

  // Rows with a live request: those of the batch, and those that wait.
  live(i) {
    return this.lives.map((_, row) => row).filter((row) => this.owner(row, i) >= 0);
  }

  holders(i, g, block) {
    const { held } = this.at(i);
    return this.live(i).filter((row) => {
      const { ids, n } = held[g * R + row];
      const column = ids.indexOf(block);
      return column >= 0 && column < n;
    });
  }

  history(g, block) {
    const [spans, open] = [[], new Map()];
    for (let i = 0; i < this.length; i++) {
      const now = new Map(this.holders(i, g, block).map((row) => [row, this.owner(row, i)]));
      for (const [row, span] of open) {
        if (now.get(row) === span.request) span.last = i;
        else open.delete(row);
      }
      for (const [row, request] of now) {
        if (open.has(row)) continue;
        const span = { row, request, first: i, last: i };
        spans.push(span);
        open.set(row, span);
      }
    }
    return spans;
  }
}

// The rules of reference.py for one token, with the numbers on the way.
function mapToken(g, row, position) {
  const group = page.groups[g];
  const [K, B] = [group.block_size, group.kernel_block_size];
  const n = K / B;
  const pad = (why, column, lines) => ({ slot: -1, why, column, lines });
  if (group.kind === "state") return pad("state group: tokens have no slots", 0, []);
  if (group.kind === "ring") {
    if (!row.length) return pad("fault: the ring's row holds no block", 0, []);
    const slot = row[0] * B + (position % B);
    const lines = [`slot = ${row[0]} * ${B} + ${position} mod ${B} = ${slot}`];
    return { slot, why: "a slot of the ring", column: 0, lines };
  }
  const { size, rank, interleave: I } = page.context_parallel;
  const S = group.dcp_sharded ? size : 1;
  const [v, w] = [Math.floor(position / (K * S)), position % (K * S)];
  const lines = [`v = ${position} // ${K * S} = ${v}`, `w = ${position} mod ${K * S} = ${w}`];
  const owner = Math.floor(w / I) % S;
  if (S > 1) lines.push(`owner = (${w} // ${I}) mod ${S} = ${owner}`);
  const all = S > 1 && rank === null; // the token's owner, whichever it is
  if (S > 1 && !all && owner !== rank) return pad(`rank ${owner} owns the token`, -1, lines);
  const local = Math.floor(w / (S * I)) * I + (w % I);
  const column = v * n + Math.floor(local / B);
  lines.push(`column = ${v} * ${n} + ${local} // ${B} = ${column}`);
  if (v >= row.length) return pad("fault: the row has not filled the token's column", v, lines);
  const id = row[v] * n + (column % n);
  const slot = id * B + (local % B);
  lines.push(`block id = table[row, ${column}] = ${id}`);
  lines.push(`slot = ${id} * ${B} + ${local % B} = ${slot}`);
  const why = [all && `on rank ${owner}`, !row[v] && "the null block"].filter(Boolean).join(", ");
  return { slot, why, column: v, lines };
}

// Allocation blocks of a row that tokens [first, first + count) write.
function written(g, first, count) {
  const group = page.groups[g];
  if (!count) return [0, -1];
  if (group.kind === "ring") return [0, 0];
  const size = group.block_size * (group.dcp_sharded ? page.context_parallel.size : 1);
  const last = Math.floor((first + count - 1) / size);
  return [group.kind === "state" ? last : Math.floor(first / size), last];
}
