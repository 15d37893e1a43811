"""Draws strong and weak scaling from what the bench `step` prints: `scaling.py STEPS.txt FOLDER`.

Strong: the optimizer's step in stage 2, how many times as fast as on one rank. Weak: a whole training step with as many tokens
on each rank, as a share of one rank's speed.
"""

import pathlib
import re
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 280, 52, 34, 92, 40
COLOURS = ["#1b6ca8", "#c8553d", "#4f772d"]


def read(text):
    """Milliseconds by model and world: of the optimizer's step, and of a training step."""
    optimizer, training, now = {}, {}, None
    for line in text.splitlines():
        if found := re.match(r"(\S+), world (\d+):", line):
            now = found[1], int(found[2])
        elif found := re.match(r"\s+stage 2\s+(\S+)", line):
            optimizer.setdefault(now[0], {})[now[1]] = float(found[1])
        elif found := re.search(r"alone, (\S+) with the step", line):
            training.setdefault(now[0], {})[now[1]] = float(found[1])
    return optimizer, training


def picture(title, axis, curves, ideal):
    """A line for each model over the worlds, and the ideal, dashed."""
    worlds = sorted({world for curve in curves.values() for world in curve})
    top = 1.1 * max(max(curve.values()) for curve in [*curves.values(), ideal])
    x = lambda world: LEFT + (WIDTH - LEFT - RIGHT) * worlds.index(world) / max(len(worlds) - 1, 1)
    y = lambda value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
    text = lambda x, y, words, more="": f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'

    def line(curve, colour, more=""):
        points = " ".join(f"{x(world):.1f},{y(curve[world]):.1f}" for world in sorted(curve))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" {more}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 18, title, 'font-size="14"'),
        text(LEFT, HEIGHT - 6, "ranks, one a GPU"),
        text(6, TOP - 4, axis),
    ]
    tick = 0.5 if top > 1.5 else 0.25
    for value in (tick * i for i in range(int(top / tick) + 1)):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y(value) + 4, f"{value:.2f}", 'text-anchor="end"'))
    parts += [text(x(world), HEIGHT - BOTTOM + 16, world, 'text-anchor="middle"') for world in worlds]
    parts.append(line({world: ideal[world] for world in worlds}, "#999", 'stroke-dasharray="5 4"'))
    ends = sorted(curves, key=lambda name: curves[name][max(curves[name])])
    height = float("inf")
    for name in ends:
        curve, colour = curves[name], COLOURS[list(curves).index(name)]
        last = max(curve)
        height = min(y(curve[last]), height - 14)
        label = f"{name} {curve[last]:.2f}"
        parts += [line(curve, colour), text(x(last) + 8, height + 4, label, f'fill="{colour}"')]
    return "\n".join([*parts, "</svg>", ""])


def main(source, folder):
    optimizer, training = read(pathlib.Path(source).read_text())
    relative = lambda times: {
        model: {world: by[1] / time for world, time in by.items()} for model, by in times.items() if 1 in by and len(by) > 1
    }
    worlds = {world for by in optimizer.values() for world in by}
    strong = picture("Optimizer step, strong scaling", "speed", relative(optimizer), {world: world for world in worlds})
    weak = picture("Training step, weak scaling", "speed of a rank", relative(training), dict.fromkeys(worlds, 1.0))
    pathlib.Path(folder, "strong-scaling.svg").write_text(strong)
    pathlib.Path(folder, "weak-scaling.svg").write_text(weak)


if __name__ == "__main__":
    main(*sys.argv[1:])
