"""The figures of docs/learn as SVG in the colour of the text: `python docs/learn/figures.py`."""

from __future__ import annotations

from pathlib import Path

# A figure by itself follows the light or dark mode; the site inlines it without this line.
STYLE = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"
BLUE, ORANGE, GREEN, GREY = "#5b7fd6", "#e08a3c", "#4fa36c", "#8a8a8a"


def write(x: float, y: float, words: str, size: int = 14, anchor: str = "middle") -> str:
    """Return a text whose base line begins, ends or has its middle at (x, y)."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    words: str,
    fill: str = GREY,
    share: float = 0.3,
) -> str:
    """Return a rectangle with a text in its middle."""
    shape = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" '
        f'fill-opacity="{share}" stroke="{fill}"/>'
    )
    return shape + write(x + width / 2, y + height / 2 + 5, words)


def arrow(*points: tuple[float, float], head: bool = True) -> str:
    """Return a line through points, with a head at its end."""
    path = " L".join(f"{x} {y}" for x, y in points)
    end = ' marker-end="url(#head)"' if head else ""
    return f'<path d="M{path}" fill="none" stroke="currentColor" stroke-width="1.5"{end}/>'


def svg(width: int, height: int, *parts: str) -> str:
    """Return the file of a figure."""
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker>'
        "</defs>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'style="max-width:{width}px" font-family="sans-serif" fill="currentColor">\n'
        f"{STYLE}\n{head}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def draw_input() -> str:
    """Draw figure 2 for a pair of sentences."""
    tokens = [
        "[CLS]",
        *["anna", "saw", "a", "dog", "."],
        "[SEP]",
        *["she", "likes", "it", "."],
        "[SEP]",
    ]
    parts = []
    rows = (("token", BLUE), ("segment", ORANGE), ("position", GREEN))
    for row, (name, colour) in enumerate(rows):
        y = 20 + 55 * row
        parts.append(write(70, y + 20, name, anchor="end"))
        for at, token in enumerate(tokens):
            words = (token, "A" if at < 7 else "B", str(at))[row]
            parts.append(box(80 + 58 * at, y, 54, 30, words, colour))
            parts.append(write(107 + 58 * at, y + 46, "+" if row < 2 else "="))
    parts.append(write(70, 205, "sum", anchor="end"))
    parts += [box(80 + 58 * at, 185, 54, 30, f"x{at}") for at in range(len(tokens))]
    return svg(790, 230, *parts)


def draw_attention() -> str:
    """Draw the weights of the first example of chapter 3."""
    names = ("the", "white", "dog")
    weights = ((0.140, 0.284, 0.576), (0.446, 0.446, 0.108), (0.074, 0.306, 0.620))
    parts = [write(70 + 90 * at + 45, 30, name) for at, name in enumerate(names)]
    for row, name in enumerate(names):
        parts.append(write(60, 65 + 50 * row, name, anchor="end"))
        for at, weight in enumerate(weights[row]):
            parts.append(box(70 + 90 * at, 40 + 50 * row, 86, 46, f"{weight:.3f}", BLUE, weight))
    parts.append(write(355, 65, "row: who reads", 13, "start"))
    parts.append(write(355, 85, "column: who is read", 13, "start"))
    return svg(500, 200, *parts)


def draw_block() -> str:
    """Draw a layer, post-norm as in BERT and pre-norm beside it."""

    def column(
        x: float, title: str, names: tuple[str, ...], skips: tuple[tuple[int, int], ...]
    ) -> str:
        parts = [write(x + 80, 22, title, 15), write(x + 80, 400, "x")]
        for at, name in enumerate(names):
            y = 340 - 50 * at
            colour = {"+": GREY, "LayerNorm": ORANGE}.get(name, BLUE)
            parts.append(
                box(
                    x + (60 if name == "+" else 20), y, 40 if name == "+" else 120, 30, name, colour
                )
            )
            parts.append(arrow((x + 80, y + 48), (x + 80, y + 31)))
        parts.append(arrow((x + 80, 340 - 50 * (len(names) - 1)), (x + 80, 32)))
        for start, end in skips:
            low, high = 340 - 50 * start + 39, 340 - 50 * end + 15
            parts.append(arrow((x + 80, low), (x + 158, low), (x + 158, high), (x + 101, high)))
        return "".join(parts)

    post = ("attention", "+", "LayerNorm", "feed-forward", "+", "LayerNorm")
    pre = ("LayerNorm", "attention", "+", "LayerNorm", "feed-forward", "+")
    return svg(
        460, 410,
        column(20, "BERT: post-norm", post, ((0, 1), (3, 4))),
        column(260, "pre-norm", pre, ((0, 2), (3, 5))),
    )  # fmt: skip


def draw_masking() -> str:
    """Draw 100 tokens as squares, and what becomes of the 15 that are predicted."""
    parts = []
    for at in range(200):  # half a token each
        x, y = 20 + 14 * (at // 2 % 50), 20 + 26 * (at // 100)
        colour = BLUE if at < 24 else ORANGE if at < 27 else GREEN if at < 30 else GREY
        shade = 0.9 if at < 30 else 0.2
        parts.append(
            f'<rect x="{x + 6 * (at % 2)}" y="{y}" width="6" height="20" fill="{colour}" '
            f'fill-opacity="{shade}"/>'
        )
    names = (
        (BLUE, "12 [MASK]"),
        (ORANGE, "1.5 random"),
        (GREEN, "1.5 kept"),
        (GREY, "85 not predicted"),
    )
    for at, (colour, name) in enumerate(names):
        parts.append(f'<rect x="{20 + 150 * at}" y="88" width="14" height="14" fill="{colour}"/>')
        parts.append(write(42 + 150 * at, 100, name, 14, "start"))
    return svg(740, 120, *parts)


def draw_curve(losses: tuple[float, ...], steps: int, levels: tuple[tuple[float, str], ...]) -> str:
    """Draw a loss over the steps, with levels to compare it with."""
    top, height, left, width = 20.0, 220.0, 60.0, 560.0
    most = max(*losses, *(level for level, _ in levels))

    def at(step: float, loss: float) -> tuple[float, float]:
        return round(left + width * step / steps, 1), round(top + height * (1 - loss / most), 1)

    each = steps / len(losses)
    line = " ".join(
        f"{x},{y}" for x, y in (at(each * (n + 0.5), loss) for n, loss in enumerate(losses))
    )
    parts = [f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>']
    parts.append(arrow((left, top), (left, top + height), (left + width, top + height), head=False))
    for level, name in levels:
        (x, y), (end, _) = at(0, level), at(steps, level)
        parts.append(f'<path d="M{x} {y}H{end}" stroke="{ORANGE}" stroke-dasharray="6 4"/>')
        parts.append(write(end, y - 6, name, 13, "end"))
    for loss in range(0, int(most) + 1):
        parts.append(write(left - 8, at(0, loss)[1] + 5, str(loss), 13, "end"))
    for step in range(0, steps + 1, steps // 4):
        parts.append(write(at(step, 0)[0], top + height + 20, str(step), 13))
    parts.append(write(left - 8, top - 4, "loss", 13, "end"))
    parts.append(write(left + width / 2, top + height + 40, "steps", 13))
    return svg(640, 290, *parts)


def draw_parameters() -> str:
    """Draw BERT-base with both heads, part by part, in millions."""
    rows = (
        ("feed-forward, 12 layers", 56.669, BLUE), ("attention, 12 layers", 28.348, BLUE),
        ("token embedding", 23.441, GREEN), ("masked LM head", 0.623, ORANGE),
        ("pooler", 0.591, ORANGE), ("positions", 0.393, GREEN), ("LayerNorms", 0.038, BLUE),
        ("segments, pair head", 0.003, GREEN),
    )  # fmt: skip
    parts = []
    for at, (name, count, colour) in enumerate(rows):
        y = 15 + 32 * at
        parts.append(write(190, y + 17, name, anchor="end"))
        parts.append(
            f'<rect x="200" y="{y}" width="{max(1, 7 * count):.0f}" height="24" fill="{colour}"/>'
        )
        parts.append(write(208 + 7 * count, y + 17, f"{count:.3f} M", 13, "start"))
    return svg(690, 280, *parts)


LOSSES = (
    4.09, 2.49, 1.77, 1.31, 1.15, 1.18, 1.2, 1.12, 1.09, 1.07, 1.07, 1.07, 1.08, 0.97, 0.95, 1.0,
    1.03, 0.96, 0.89, 0.87, 0.88, 0.85, 0.92, 0.89, 0.82, 0.83, 0.79, 0.81, 0.77, 0.83, 0.8, 0.84,
    0.79, 0.7, 0.75, 0.74, 0.82, 0.82, 0.74, 0.77,
)  # fmt: skip
"""Means of ten steps each in a run of chapter 7."""
LEVELS = ((4.42, "ln 83: all tokens alike"), (1.05, "knows the kind of word only"))
FIGURES = {
    "input": draw_input(), "attention": draw_attention(), "block": draw_block(),
    "curve": draw_curve(LOSSES, 400, LEVELS),
    "masking": draw_masking(), "parameters": draw_parameters(),
}  # fmt: skip

if __name__ == "__main__":
    for name, figure in FIGURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(figure, "utf8")
