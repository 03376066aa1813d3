"""Draws the pictures of docs/concepts.md: python docs/pictures/concepts.py"""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, PALE, NONE = "#1f2933", "#eef1f4", "#ffffff"
BLUE, GREEN, ORANGE, GREY = "#bcd9f5", "#c4e7c9", "#fbdcae", "#d5dae0"
FONT = "font-family='DejaVu Sans, Arial, sans-serif'"


class Picture:
    """Cells, words and arrows on a white page, which stays readable in a dark theme."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img' {FONT}>",
            f"<title>{escape(title)}</title>",
            "<defs><marker id='a' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
            f"markerHeight='7' orient='auto'><path d='M0 0 L10 5 L0 10 z' fill='{INK}'/>"
            "</marker></defs>",
            f"<rect width='{width}' height='{height}' rx='8' fill='{NONE}'/>",
        ]

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "start") -> None:
        self.parts.append(
            f"<text x='{x}' y='{y}' font-size='{size}' fill='{INK}' text-anchor='{anchor}'>"
            f"{escape(words)}</text>"
        )

    def cells(
        self, x: float, y: float, words: list, colours: list | str = NONE, size: int = 36
    ) -> None:
        for i, word in enumerate(words):
            colour = colours if isinstance(colours, str) else colours[i]
            self.parts.append(
                f"<rect x='{x + i * size}' y='{y}' width='{size}' height='28' fill='{colour}' "
                f"stroke='{INK}'/>"
            )
            self.text(x + (i + 0.5) * size, y + 19, str(word), 12, "middle")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' stroke-width='1.4' "
            "marker-end='url(#a)'/>"
        )

    def brace(self, x1: float, x2: float, y: float, words: str) -> None:
        self.parts.append(
            f"<path d='M{x1} {y} v6 H{x2} v-6' fill='none' stroke='{INK}' stroke-width='1.2'/>"
        )
        self.text((x1 + x2) / 2, y + 22, words, 12, "middle")

    def save(self, name: str) -> None:
        path = Path(__file__).parent / f"{name}.svg"
        path.write_text("\n".join([*self.parts, "</svg>\n"]))


def slots() -> None:
    p = Picture(720, 250, "From a position to its slot")
    p.text(20, 28, "A request's tokens, by position")
    p.cells(20, 38, list(range(10)), [BLUE] * 4 + [GREEN] * 4 + [ORANGE] * 2)
    p.cells(20, 106, [3, 7, 4], [BLUE, GREEN, ORANGE], 60)
    p.arrow(254, 68, 112, 104)
    p.text(215, 118, "its row of the block table:")
    p.text(215, 136, "position 6 is in column 6 // 4 = 1, which holds block 7")
    colours = [{3: BLUE, 7: GREEN, 4: ORANGE}.get(slot // 4, PALE) for slot in range(40)]
    for slot, colour in enumerate(colours):
        p.cells(20 + slot * 17, 170, [""], colour, 17)
    for block in range(10):
        p.text(20 + block * 68 + 34, 214, f"block {block}", 11, "middle")
    p.arrow(112, 136, 20 + 30.5 * 17, 168)
    p.text(20, 238, "the pool, 10 blocks of 4 slots: position 6 has slot 7 · 4 + 6 mod 4 = 30")
    p.save("concepts_slots")


def groups() -> None:
    p = Picture(720, 260, "One request in the tables of four groups")
    p.text(20, 28, "One request of 14 tokens, in blocks of 4, in each group's table")
    rows = [
        ("full attention", [5, 2, 9, 6], [BLUE] * 4, "every block, for good"),
        ("sliding window", [0, 0, 8, 3], [GREY, GREY, GREEN, GREEN], "old ones are freed"),
        ("Mamba state", [4], [ORANGE], "one state, however long the text; no slots"),
        ("ring", [7], [GREEN], "one block, written round and round"),
    ]
    for i, (name, cells, colours, note) in enumerate(rows):
        p.text(20, 71 + i * 50, name)
        p.cells(150, 52 + i * 50, cells, colours, 50)
        p.text(150 + 50 * len(cells) + 16, 71 + i * 50, note, 12)
    p.save("concepts_groups")


def batch() -> None:
    p = Picture(720, 300, "The arguments of a step and its result")
    p.text(20, 40, "idx_mapping")
    p.cells(170, 22, [5, 2, -1], [BLUE, GREEN, GREY], 60)
    p.text(370, 41, "by batch entry: its row; -1 is a dummy", 12)
    p.text(20, 90, "query_start_loc")
    p.cells(170, 72, [0, 1, 4, 5], PALE, 60)
    p.text(430, 91, "where each entry's tokens begin, and the end", 12)
    p.text(20, 140, "positions")
    p.cells(170, 122, [41, 8, 9, 10, 0], [BLUE] + [GREEN] * 3 + [GREY], 60)
    p.text(490, 141, "by token, in its request", 12)
    p.text(20, 200, "slot_mappings")
    p.text(60, 221, "group 0", 12)
    p.cells(170, 200, [57, 24, 25, 26, "PAD", "PAD", "PAD"],
            [BLUE] + [GREEN] * 3 + [GREY] * 3, 60)  # fmt: skip
    p.text(60, 250, "group 1", 12)
    p.cells(170, 229, [137, 88, 89, 90, "PAD", "PAD", "PAD"],
            [BLUE] + [GREEN] * 3 + [GREY] * 3, 60)  # fmt: skip
    p.brace(470, 590, 262, "behind the last token: PAD in every call")
    p.save("concepts_batch")


def reach() -> None:
    p = Picture(720, 190, "Reach of a sliding window")
    p.text(20, 28, "A window of 8 tokens, blocks of 4, 18 tokens computed; reach 7")
    colours = [GREY] * 8 + [PALE] * 3 + [BLUE] * 7 + [ORANGE] * 2
    for position in range(20):
        p.cells(20 + position * 33, 42, [position], colours[position], 33)
    p.brace(20 + 11 * 33, 20 + 18 * 33, 74, "reach: 7 tokens")
    p.text(20 + 18 * 33, 96, "scheduled", 12)
    p.text(20, 134, "Gathered row")
    for column, block in enumerate([0, 0, 8, 3, 6]):
        p.cells(20 + column * 132, 146, [block], GREY if column < 2 else GREEN, 132)
    p.save("concepts_reach")


def ring() -> None:
    p = Picture(720, 165, "A ring of four slots")
    p.text(20, 28, "Block 7 of 4 slots; position p goes to slot 7 · 4 + p mod 4")
    for i, (title, cells) in enumerate([
        ("after position 3", [0, 1, 2, 3]),
        ("after position 5", [4, 5, 2, 3]),
        ("after position 10", [8, 9, 10, 7]),
    ]):  # fmt: skip
        p.text(20 + i * 235, 66, title, 12)
        p.cells(20 + i * 235, 76, cells, [ORANGE if i and c > 3 else PALE for c in cells], 46)
        if i:
            p.arrow(i * 235 - 25, 90, 14 + i * 235, 90)
    p.text(20, 134, "slots 28 to 31", 12)
    p.save("concepts_ring")


def replay() -> None:
    p = Picture(720, 235, "Replay after a prefix hit")
    p.text(20, 28, "16 of 18 prompt tokens are in the prefix cache; the window (8) is not")
    colours = [GREY] * 8 + [ORANGE] * 8 + [BLUE] * 2
    for position in range(18):
        p.cells(20 + position * 36, 42, [position], colours[position])
    p.brace(20 + 8 * 36, 20 + 16 * 36, 74, "replayed: computed again")
    p.brace(20 + 16 * 36 + 3, 20 + 18 * 36, 74, "new")
    p.text(20, 142, "full (shared)")
    p.cells(308, 124, ["PAD"] * 8 + ["w", "w"], [GREY] * 8 + [BLUE] * 2)
    p.text(20, 184, "sliding (the request's own)")
    p.cells(308, 166, ["w"] * 10, [ORANGE] * 8 + [BLUE] * 2)
    p.text(20, 220, "w: the token gets a slot and is written", 12)
    p.save("concepts_replay")


def split() -> None:
    p = Picture(720, 190, "An allocation block split into kernel blocks")
    p.text(20, 28, "The engine allocates blocks of 32 tokens; attention reads blocks of 16")
    p.text(20, 69, "appended")
    p.cells(150, 50, ["block 3", "block 7"], [BLUE, GREEN], 200)
    p.text(20, 139, "the row")
    p.cells(150, 120, [6, 7, 14, 15], [BLUE, BLUE, GREEN, GREEN], 100)
    for x in (200, 300, 400, 500):
        p.arrow(x, 80, x, 118)
    p.text(150, 172, "num_blocks counts columns: 4", 12)
    p.save("concepts_split")


def ranks() -> None:
    p = Picture(720, 200, "Context parallelism over two ranks")
    p.text(20, 28, "Two ranks, interleave 2: who stores which position (block_size 4)")
    owners = [(position // 2) % 2 for position in range(16)]
    for position, owner in enumerate(owners):
        p.cells(20 + position * 40, 42, [position], ORANGE if owner else BLUE, 40)
    for rank, colour in enumerate((BLUE, ORANGE)):
        p.text(20, 119 + rank * 44, f"rank {rank}")
        mine = [position for position in range(16) if owners[position] == rank]
        p.cells(100, 100 + rank * 44, mine, colour, 40)
    p.brace(100, 260, 174, "block in column 0")
    p.brace(262, 420, 174, "column 1")
    p.save("concepts_ranks")


if __name__ == "__main__":
    for draw in (slots, groups, batch, reach, ring, replay, split, ranks):
        draw()
